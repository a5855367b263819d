"""The routes that the variants use, and a watch on the engine's own counters.

The watch is the demo's ruler, the same for all three variants: SGLang's scheduler publishes a load snapshot at every
step (``/v1/loads``), with its own clock, the samples running, and counters of decoded and prefilled tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

POLL_S = 0.02
SETTLE_S = 0.05


class EngineError(RuntimeError):
    """A route answered with an error; the message holds the route and the answer."""


@dataclass(frozen=True)
class Snapshot:
    """One look at the scheduler: its clock (seconds), the samples running, and what it has done so far: tokens decoded
    (the first token of a sample comes from its prefill and is not among them), tokens prefilled, decode steps."""

    time: float
    running: int
    decoded: int
    prefilled: int
    steps: int


class Engine:
    """A thin client of one server."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, route: str, body: dict[str, Any]) -> Any:
        """POSTs JSON and returns the decoded answer; anything but 200 raises."""
        answer = await self._http.post(route, json=body)
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"POST {route}: {answer.status_code} {answer.text[:500]}")
        return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text

    async def get(self, route: str) -> Any:
        """GETs JSON; anything but 200 raises."""
        answer = await self._http.get(route)
        if answer.status_code != httpx.codes.OK:
            raise EngineError(f"GET {route}: {answer.status_code} {answer.text[:500]}")
        return answer.json()

    async def load_weights(self, checkpoint: Path, **options: Any) -> None:
        """One SGLang weight call with a whole checkpoint."""
        answer = await self.post("/update_weights_from_disk", {"model_path": str(checkpoint), **options})
        if not answer.get("success"):
            raise EngineError(f"the weights of {checkpoint} were refused: {answer}")

    async def snapshot(self) -> Snapshot:
        """The newest published snapshot. `decode_moments`: sums (first steps, last tokens) or None."""
        load = (await self.get("/v1/loads?include=core"))["loads"][0]
        moments = load["decode_moments"]
        steps, decoded = (int(moments[0]), int(moments[-1])) if moments else (0, 0)
        prefilled = load["total_prefill_uncached_tokens"]
        return Snapshot(load["timestamp"], load["num_running_reqs"], decoded, prefilled, steps)


class Watch:
    """The snapshots that were seen while a variant ran, in the order of the scheduler's clock."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.snapshots: list[Snapshot] = []

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Watch]:
        """Polls in the background as long as the context lasts."""
        task = asyncio.create_task(self._poll())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _poll(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(POLL_S)

    async def look(self) -> Snapshot:
        """One look now; a snapshot seen twice is kept once."""
        seen = await self._engine.snapshot()
        if not self.snapshots or seen.time > self.snapshots[-1].time:
            self.snapshots.append(seen)
        return seen

    async def settled(self) -> Snapshot:
        """The counters once the engine has nothing to do and no longer counts."""
        before = await self.look()
        while True:
            await asyncio.sleep(SETTLE_S)
            now = await self.look()
            if now.running == 0 and (now.decoded, now.prefilled) == (before.decoded, before.prefilled):
                return now
            before = now

    def decoded_at(self, moment: float) -> float:
        """Tokens decoded up to a moment of the scheduler's clock, linear between the snapshots around it."""
        at = bisect_right(self.snapshots, moment, key=lambda snapshot: snapshot.time)
        if at == 0 or at == len(self.snapshots):
            return float(self.snapshots[max(0, at - 1)].decoded)
        left, right = self.snapshots[at - 1], self.snapshots[at]
        return left.decoded + (right.decoded - left.decoded) * (moment - left.time) / (right.time - left.time)
