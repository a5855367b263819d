"""Pushes and pauses: the scheduler suspends the samples before the rounds' locks on the weights are released."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sglang_april.api import messages
from sglang_april.http.audit import Audit
from sglang_april.http.rounds import RoundRegistry
from sglang_april.http.scheduler_rpc import SchedulerRpc
from sglang_april.http.weight_lock import WeightLock


class Pushes:
    def __init__(
        self,
        rpc: SchedulerRpc,
        weight_lock: WeightLock,
        rounds: RoundRegistry,
        audit: Audit,
        pushed: Callable[[float], None],
    ) -> None:
        """`pushed` is called with the seconds of each complete push."""
        self._rpc, self._weight_lock, self._rounds, self._audit, self._pushed = rpc, weight_lock, rounds, audit, pushed
        self._began = 0.0
        self._pushing = asyncio.Lock()
        self.pausing = asyncio.Lock()
        """Serializes pauses and their ends."""

    async def begin(self, version: int | None) -> dict[str, Any]:
        """Suspend all samples in the scheduler, then release the rounds' reader locks so that weight calls can run."""
        async with self._pushing, self._audit.paused():
            began = time.monotonic()
            answer = await self._rpc.call(messages.PushBegin(self._rpc.number(), version))
            self._began = began
            await self._weight_lock.release_all("push")
        return {"push_open": True, **answer.data}

    async def end(self, version: int | None) -> dict[str, Any]:
        """End a push: the weights are complete, the policy version moves and open rounds resume."""
        async with self._pushing:
            answer = await self._rpc.call(messages.PushEnd(self._rpc.number(), version))
            self._weight_lock.unblock("push", self._rounds.open_ids())
            self._pushed(time.monotonic() - self._began)
        return {"push_open": False, **answer.data}

    async def freeze(self) -> None:
        """Begin a pause: no sample takes a step, and the pause waits for no round."""
        await self._rpc.call(messages.Freeze(self._rpc.number()))
        await self._weight_lock.release_all("pause")

    async def thaw(self) -> None:
        """End the pause."""
        await self._rpc.call(messages.Thaw(self._rpc.number()))
        self._weight_lock.unblock("pause", self._rounds.open_ids())
