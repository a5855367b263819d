"""Pushes to several engines."""

import asyncio

import pytest

from sglang_april.client import AprilError, PushLeftOpenError
from sglang_april.client.async_engine_pool import AsyncEnginePool
from sglang_april.client.types import RolloutSummary
from tests.bridge.engine_pool_rounds import delivered_ids, engine_pool, request, run_round


def test_a_push_gives_all_engines_one_version() -> None:
    """Also one that was restarted and is at version 0: otherwise every round would end with a 409."""
    pool, engines = engine_pool()
    engines[0].version = 7
    with pytest.raises(AprilError, match=r"versions \[0, 7\]; push to all of them"):
        run_round(pool, request("r.1", "a1 b1", 2))
    with pool.push():
        pass
    assert [engine.version for engine in engines] == [8, 8]
    assert delivered_ids(reply := run_round(pool, request("r.1", "a1 b1", 2))) == ["a1", "b1"]
    assert reply.policy_version == 8


def test_a_push_between_the_ends_of_a_round_at_two_engines_loses_nothing() -> None:
    pool, engines = engine_pool()
    events = pool.stream(**request("r.1", "a1 b1", 2, previews=True))
    next(events)
    engines[0].version = 1
    *_, event = events
    assert isinstance(event, RolloutSummary)
    assert (event.policy_version, sorted(delivered_ids(event))) == (1, ["a1", "b1"])


def test_a_failed_push_stays_open_at_every_engine() -> None:
    pool, engines = engine_pool()
    with pytest.raises(PushLeftOpenError), pool.push(3):
        raise ValueError("a weight call failed")
    assert [engine.version for engine in engines] == [0, 0]


def test_a_push_that_fails_or_is_cancelled_stays_open() -> None:
    pool, engines = engine_pool()

    async def push(error: BaseException) -> None:
        async with AsyncEnginePool(pool).push():
            raise error

    with pytest.raises(PushLeftOpenError):
        asyncio.run(push(ValueError("a weight call failed")))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(push(KeyboardInterrupt()))
    assert [engine.version for engine in engines] == [0, 0]


def test_a_push_that_begins_at_some_engines_only_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds at the first engine are refused until another push."""
    pool, engines = engine_pool()

    def refuse(_version: int) -> None:
        raise AprilError(409, "version", "is refused")

    monkeypatch.setattr(engines[1], "push_begin", refuse)
    with pytest.raises(PushLeftOpenError, match="is refused"), pool.push(3):
        pass
    monkeypatch.setattr(engines[0], "push_begin", refuse)
    with pytest.raises(AprilError, match="is refused"), pool.push(3):
        pass
