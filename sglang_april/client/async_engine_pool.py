"""`EnginePool` for asyncio: the same methods; their calls run in threads, so that no engine blocks the event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sglang_april.client.calls import with_round_id
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.follow import follow
from sglang_april.client.shared_round import SharedRound
from sglang_april.client.types import RolloutGroup, RolloutSummary


class AsyncEnginePool:
    """The calls of a pool, awaitable."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def stream(self, **body: Any) -> AsyncIterator[RolloutGroup | RolloutSummary]:
        """A round over all engines: groups as they finish, then one summary. The error of an engine is raised.

        When it is closed or cancelled, the round stays open at the engines, and can be repeated under its `round_id`.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()
        shared = SharedRound(self._pool.clients, with_round_id(body))

        def put(event: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        follow(self._pool.run(shared), put, "april rollout")
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, RolloutSummary):
                    return
        finally:
            shared.close()
            await asyncio.to_thread(shared.wait_closed)

    async def judge(self, round_id: str, accept: Iterable[str] = (), reject: Iterable[str] = ()) -> None:
        """As `EnginePool.judge`."""
        await asyncio.to_thread(self._pool.judge, round_id, accept, reject)

    async def extend(self, round_id: str, quota_add: int = 0, prompts: Iterable[Mapping[str, Any]] = ()) -> None:
        """As `EnginePool.extend`."""
        await asyncio.to_thread(self._pool.extend, round_id, quota_add, prompts)

    async def ack(self, round_id: str) -> None:
        """As `EnginePool.ack`."""
        await asyncio.to_thread(self._pool.ack, round_id)

    async def partials(self, run: str) -> dict[str, Any]:
        """As `EnginePool.partials`."""
        return await asyncio.to_thread(self._pool.partials, run)

    async def drop(self, run: str, ids: Sequence[str] | None = None) -> None:
        """As `EnginePool.drop`."""
        await asyncio.to_thread(self._pool.drop, run, ids)

    @asynccontextmanager
    async def push(self, version: int | None = None) -> AsyncIterator[None]:
        """As `EnginePool.push`: it gives all engines one version, also those that were restarted."""
        push = self._pool.push(version)
        await asyncio.to_thread(push.__enter__)
        try:
            yield
        except BaseException as error:
            await asyncio.to_thread(push.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(push.__exit__, None, None, None)
