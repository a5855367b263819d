"""Asynchronous HTTP client of one server, the same for every variant, and the scheduler's counters.

It uses aiohttp: with hundreds of requests per round, the overhead of httpx would dominate the comparison.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from sglang_april.client.types import RolloutGroup, RolloutReply, RolloutSummary, read_event, read_reply

POLL_S = 0.02
KEEP_ALIVE_S = 2.0
"""Shorter than the five seconds after which the server closes idle connections."""
PACKED = {"content-type": "application/msgpack", "accept": "application/msgpack"}


class EngineError(RuntimeError):
    """An HTTP error; the message has the route and the response body."""

    def __init__(self, route: str, status: int, content: bytes) -> None:
        super().__init__(f"{route}: {status} {content[:500]!r}")
        self.status, self.content = status, content


@dataclass(frozen=True)
class Counters:
    """Cumulative counters of the scheduler (`/v1/loads`). A sample's first token comes from its prefill and is not
    counted as decoded."""

    time: float
    running: int
    waiting: int
    steps: int
    decoded: int
    prefilled: int


class EngineClient:
    """Client of one server. `patched`: whether it runs the plugin."""

    def __init__(self, url: str, patched: bool) -> None:
        self.patched = patched
        self._http = aiohttp.ClientSession(
            url,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self._http.close()

    async def post(self, route: str, body: dict[str, Any], more_headers: dict[str, str] | None = None) -> Any:
        """POST JSON and return the decoded response.

        Raises:
            EngineError: the status is not 200.
        """
        headers = {"content-type": "application/json", **(more_headers or {})}
        async with self._http.post(route, data=msgspec.json.encode(body), headers=headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise EngineError(f"POST {route}", answer.status, content)
            is_json = answer.content_type == "application/json"
            return msgspec.json.decode(content) if is_json and content else content

    async def get(self, route: str) -> Any:
        """GET JSON.

        Raises:
            EngineError: the status is not 200.
        """
        async with self._http.get(route) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise EngineError(f"GET {route}", answer.status, content)
            return msgspec.json.decode(content)

    async def rollout(self, body: dict[str, Any]) -> RolloutReply:
        """One batch-quota round, msgpack in both directions."""
        async with self._http.post("/april/rollout", data=msgspec.msgpack.encode(body), headers=PACKED) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise EngineError("POST /april/rollout", answer.status, content)
            return read_reply(msgspec.msgpack.decode(content))

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[RolloutGroup | RolloutSummary]:
        """A streamed round: groups as they finish, then the summary."""
        data = msgspec.json.encode({**body, "stream": True})
        async with self._http.post(
            "/april/rollout", data=data, headers={"content-type": "application/json"}, read_bufsize=2**26
        ) as answer:
            if answer.status != 200:
                raise EngineError("POST /april/rollout", answer.status, await answer.read())
            async for line in answer.content:
                yield read_event(msgspec.json.decode(line))

    async def connect(self, requests: int) -> None:
        """Open connections for this many concurrent requests in advance, so that a variant that has rested does not
        open them while it is timed."""
        await asyncio.gather(*(self._ping() for _ in range(requests)))

    async def _ping(self) -> None:
        async with self._http.get("/ping") as answer:
            await answer.read()

    async def load_weights(self, checkpoint: Path, *, flush: bool) -> None:
        """Load a whole checkpoint in one SGLang weight call."""
        answer = await self.post("/update_weights_from_disk", {"model_path": str(checkpoint), "flush_cache": flush})
        if not answer.get("success"):
            raise EngineError(f"the weights of {checkpoint}", 500, msgspec.json.encode(answer))

    async def counters(self) -> Counters:
        """The most recently published counters."""
        load = (await self.get("/v1/loads?include=core"))["loads"][0]
        moments = load["decode_moments"]
        steps, decoded = (int(moments[0]), int(moments[-1])) if moments else (0, 0)
        return Counters(
            load["timestamp"],
            load["num_running_reqs"],
            load["num_waiting_reqs"],
            steps,
            decoded,
            load["total_prefill_uncached_tokens"],
        )

    async def settled(self) -> Counters:
        """Wait until the counters no longer change; they are published at the start of a step, so the last step
        lags."""
        before = await self.counters()
        while True:
            await asyncio.sleep(POLL_S)
            now = await self.counters()
            if (now.decoded, now.prefilled) == (before.decoded, before.prefilled):
                return now
            before = now

    async def abort_all(self) -> None:
        """Abort all requests."""
        await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def flush(self) -> None:
        """Flush the prefix cache; a refusal (requests are running) is ignored."""
        with contextlib.suppress(EngineError):
            await self.post("/flush_cache", {})
