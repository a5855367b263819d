"""Rounds over several engines from asyncio: what their consumer sees, and what happens after it has left."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_april.client import AprilError
from sglang_april.client.async_engine_pool import AsyncEnginePool
from sglang_april.client.types import RolloutSummary
from tests.bridge.engine_pool_rounds import delivered_ids, engine_pool, request, run_round
from tests.support.live import until


def test_the_pool_of_asyncio_has_the_same_rounds_and_pushes() -> None:
    pool, engines = engine_pool()
    awaitable = AsyncEnginePool(pool)

    async def step(body: dict[str, Any]) -> RolloutSummary:
        async with awaitable.push():
            pass
        async for event in awaitable.stream(**body):
            if isinstance(event, RolloutSummary):
                return event
            with contextlib.suppress(AprilError):  # 409 for a group that finished when the quota was met
                await awaitable.judge(body["round_id"], accept=[event.id])
        raise AssertionError("the stream has no summary")

    engines[0].version = 7
    summary = asyncio.run(step({**request("r.1", "a1 b1 a2 b2", 2), "count": "accepted"}))
    assert (summary.policy_version, len(summary.delivered)) == (8, 2)


@pytest.mark.parametrize("leaves_by", ["close", "cancel"])
def test_round_whose_consumer_has_left_accepts_nothing_more(leaves_by: str) -> None:
    """Otherwise it and its repetition would both accept groups up to the quota."""
    pool, engines = engine_pool(1)
    engines[0].may_finish = 1

    async def read(first: asyncio.Event, events: Any) -> None:
        await anext(events)
        first.set()
        if leaves_by == "cancel":
            await anext(events)
        await events.aclose()

    async def leave() -> None:
        first = asyncio.Event()
        reader = asyncio.create_task(read(first, AsyncEnginePool(pool).stream(**request("r.1", "a1 a2", 2))))
        await first.wait()
        if leaves_by == "cancel":
            reader.cancel()
        await asyncio.wait([reader])

    asyncio.run(leave())
    until(lambda: not pool._open, "the thread of the round has ended")
    with engines[0].changed:
        engines[0].may_finish = 1
        engines[0].changed.notify_all()
    until(lambda: "a2" in engines[0].finished, "the next group has finished")
    assert "a2" not in engines[0].verdicts
    assert sorted(delivered_ids(run_round(pool, request("r.1", "a1 a2", 2)))) == ["a1", "a2"]


def test_a_round_whose_consumer_has_left_no_longer_waits_for_a_reply() -> None:
    pool, engines = engine_pool(1)
    body = request("r.1", "a1", 1)
    run_round(pool, body)
    engines[0].disk_full = True

    async def leave() -> None:
        reader = asyncio.create_task(anext(AsyncEnginePool(pool).stream(**body)))  # type: ignore[arg-type]
        await asyncio.to_thread(until, lambda: pool._open, "the round is repeated")
        reader.cancel()
        await asyncio.wait([reader])

    asyncio.run(leave())
    until(lambda: not pool._open, "the thread of the round has ended")


@pytest.mark.parametrize(("dead", "quota"), [(True, 3), (False, 3), (False, 1)])
def test_the_end_of_a_stream_waits_for_one_verdict_and_sends_no_other(dead: bool, quota: int) -> None:
    """Each call to an engine that has died lasts for `retry_s`. The waiting ones take all threads of the loop."""
    pool, engines = engine_pool(1)
    judge, calls, answer = engines[0].judge, list[list[str]](), threading.Event()

    def slow(round_id: str, accept: list[str]) -> dict[str, int]:
        calls.append(accept)
        assert answer.wait(10)
        if dead:
            raise AprilError(0, "server", "lost")
        return judge(round_id, accept)

    engines[0].judge = slow  # type: ignore[method-assign, assignment]

    async def leave() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        awaitable = AsyncEnginePool(pool)
        events: Any = awaitable.stream(**request("r.1", "a1 a2 a3", quota, count="accepted"))
        names = [(await anext(events)).id for _ in range(3)]
        verdicts = [asyncio.create_task(awaitable.judge("r.1", accept=names)) for _ in range(3)]
        while not calls:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(events.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        answer.set()
        await closing
        await asyncio.wait(verdicts)

    asyncio.run(leave())
    assert (calls, engines[0].rounds["r.1"].ended) == ([["a1"]], None)


def test_the_error_of_an_engine_is_raised_where_the_round_is_awaited() -> None:
    pool, engines = engine_pool()
    engines[0].version = 7

    async def read() -> None:
        async for _ in AsyncEnginePool(pool).stream(**request("r.1", "a1 b1", 2)):
            pass

    with pytest.raises(AprilError, match="push to all of them"):
        asyncio.run(read())
