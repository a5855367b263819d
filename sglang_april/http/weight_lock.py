"""Open rounds as readers of SGLang's `model_update_lock` (`push-never-waits-for-round`).

A stock weight call takes the writer side, and so waits for open rounds as it waits for requests. A push or a pause
suspends the plugin's samples in the scheduler and then releases all readers; afterwards each round acquires its reader
again in the background, where only a weight call can wait for it.
"""

import asyncio

from sglang_april.http.frontend import ReaderLock


class WeightLock:
    """One reader per open round, owned by this object and not by the client's connection."""

    def __init__(self, lock: ReaderLock) -> None:
        self._lock = lock
        self._held: set[str] = set()
        self._acquiring: dict[str, asyncio.Task[None]] = {}
        self._blocked_by: set[str] = set()

    @property
    def held(self) -> frozenset[str]:
        """Ids of the rounds that are readers now."""
        return frozenset(self._held)

    async def acquire(self, round_id: str) -> None:
        """Become a reader for a round that opens, behind any waiting weight call. No-op during a push or pause."""
        if not self._blocked_by:
            await self._acquire(round_id)

    async def release(self, round_id: str) -> None:
        """Release the reader of a round, or cancel its pending acquisition."""
        task = self._acquiring.pop(round_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._release(round_id)

    def block(self, reason: str) -> None:
        """Let no round become a reader until `unblock` with this reason."""
        self._blocked_by.add(reason)

    async def release_all(self, reason: str) -> None:
        """Block for this reason (a push or a pause) and release the readers of all rounds."""
        self.block(reason)
        for round_id in [*self._held, *self._acquiring]:
            await self.release(round_id)

    def unblock(self, reason: str, rounds: list[str]) -> None:
        """Remove this reason; when none is left, the rounds become readers again."""
        self._blocked_by.discard(reason)
        self.acquire_missing(rounds)

    def acquire_missing(self, rounds: list[str]) -> None:
        """Become a reader in the background for each of the rounds that is none, unless blocked."""
        if self._blocked_by:
            return
        for round_id in rounds:
            if round_id not in self._held and round_id not in self._acquiring:
                self._acquiring[round_id] = asyncio.create_task(self._acquire_later(round_id))

    async def _acquire_later(self, round_id: str) -> None:
        await self._acquire(round_id)
        self._acquiring.pop(round_id, None)

    async def _acquire(self, round_id: str) -> None:
        await self._lock.acquire_reader()
        self._held.add(round_id)
        if self._blocked_by:
            await self._release(round_id)

    async def _release(self, round_id: str) -> None:
        if round_id in self._held:
            self._held.discard(round_id)
            await asyncio.shield(asyncio.ensure_future(self._lock.release_reader()))
