"""Open rounds as readers of SGLang's `model_update_lock` (`push-never-waits-for-round`).

A stock weight call takes the writer side and so waits for open rounds, as it waits for requests. A push and a pause
first suspend our samples in the scheduler and then yield all holds; afterwards each is taken again, in the background:
nobody waits for it but a weight call.
"""

import asyncio

from sglang_april.http.frontend import ReaderLock


class WeightLock:
    """One reader per open round, owned by this object and not by the client's connection."""

    def __init__(self, lock: ReaderLock) -> None:
        self._lock = lock
        self._held: set[str] = set()
        self._retaking: dict[str, asyncio.Task[None]] = {}
        self._reasons: set[str] = set()

    @property
    def held(self) -> frozenset[str]:
        """Rounds that are readers at this moment."""
        return frozenset(self._held)

    async def take(self, round_id: str) -> None:
        """Become a reader for a round that opens, behind any waiting weight call; not during a push or a pause."""
        if not self._reasons:
            await self._acquire(round_id)

    async def drop(self, round_id: str) -> None:
        """Give up what a round holds, or wants to hold."""
        task = self._retaking.pop(round_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._release(round_id)

    def keep_off(self, reason: str) -> None:
        """From the start on: rounds that are open again hold nothing until `retake` with this reason."""
        self._reasons.add(reason)

    async def give_up(self, reason: str) -> None:
        """Release all rounds' readers because of a push or a pause."""
        self._reasons.add(reason)
        for round_id in [*self._held, *self._retaking]:
            await self.drop(round_id)

    def retake(self, reason: str, rounds: list[str]) -> None:
        """The push or pause is over: become a reader again for each open round once nothing else speaks against it."""
        self._reasons.discard(reason)
        self.fill(rounds)

    def fill(self, rounds: list[str]) -> None:
        """Become a reader for each open round that is none, unless a push or a pause stands against it."""
        if self._reasons:
            return
        for round_id in rounds:
            if round_id not in self._held and round_id not in self._retaking:
                self._retaking[round_id] = asyncio.create_task(self._retake(round_id))

    async def _retake(self, round_id: str) -> None:
        await self._acquire(round_id)
        self._retaking.pop(round_id, None)

    async def _acquire(self, round_id: str) -> None:
        await self._lock.acquire_reader()
        self._held.add(round_id)
        if self._reasons:
            await self._release(round_id)

    async def _release(self, round_id: str) -> None:
        if round_id in self._held:
            self._held.discard(round_id)
            await asyncio.shield(asyncio.ensure_future(self._lock.release_reader()))
