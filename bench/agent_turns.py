"""Multi-turn agents over pushes, by one of four variants.

Several agents work concurrently, each through trajectories of several turns. A turn is one `/generate` request with
everything so far as its prompt; then a tool takes its time and adds tokens. Weights are pushed at fixed intervals:

- `attached`: the requests belong to a run. The push suspends them, and their callers wait.
- `trajectory`: they also name their trajectory, which may keep their KV for the next turn.
- `resend`: on a stock server, the client aborts all requests and then pauses generation by `abort`; callers keep
  what they have and, after the push, send prompt and tokens again.
- `in_place`: on a stock server, generation is paused by `in_place`, and requests continue on the older policy's KV.

A row has delivered trajectories/s, and the prefilled tokens that are neither a prompt nor a tool's output seen for the
first time: at least one for each turn but the first, because the last token of a response has no KV.
"""

import asyncio
import random
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench import record
from bench.rollout.engine_client import EngineClient, EngineError

Variant = Literal["attached", "trajectory", "resend", "in_place"]
VARIANTS: tuple[Variant, ...] = ("attached", "trajectory", "resend", "in_place")
ATTACHED = ("attached", "trajectory")
RUN = "agents"
HEADERS = {"x-april-run": RUN}
ABORT_AGAIN_S = 0.05
"""Delay before a second abort, for requests that had not reached the engine. Others answer within a step."""


@dataclass(frozen=True)
class Load:
    """The load that the agents of one row generate."""

    agents: int
    trajectories: int
    """Total number of trajectories of the row."""
    turns: int
    prompt: int
    """Tokens of the first prompt."""
    response: int
    """Mean tokens of a turn; lengths are drawn from 1/4 to 7/4 of it."""
    tool_tokens: int
    tool_s: float
    """Mean seconds of a tool call; durations are drawn from 0 to twice the mean."""
    push_s: float
    """Seconds between the end of a push and the next one; 0: no push."""


class Agents:
    """One row: all trajectories of a load on one server, over pushes."""

    def __init__(
        self, engine: EngineClient, variant: Variant, load: Load, checkpoints: tuple[Path, Path], seed: int
    ) -> None:
        self._engine, self._variant, self._load, self._checkpoints = engine, variant, load, checkpoints
        self._seed, self._name = seed, uuid.uuid4().hex[:8]
        self._left = load.trajectories
        self._may_ask = asyncio.Event()
        self._asked: set[asyncio.Task[Any]] = set()
        """Requests without an answer."""
        self.own_tokens = 0
        """Tokens of prompts and tools, each counted once."""
        self.generated = 0
        self.resent = 0
        self.pushes = 0
        self.push_s = 0.0

    async def run(self) -> record.Row:
        """Run all trajectories; returns the measurements."""
        engine = self._engine
        await engine.flush()
        self._may_ask.set()
        before = await engine.settled()
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            pushing = group.create_task(self._push_repeatedly()) if self._load.push_s else None
            await asyncio.wait([group.create_task(self._agent()) for _ in range(self._load.agents)])
            seconds = time.monotonic() - began
            if pushing is not None:
                pushing.cancel()
        if pushing is not None:
            await self._resume()
        after = await engine.settled()
        prefilled = after.prefilled - before.prefilled
        return {
            "seconds": seconds,
            "trajectories_per_s": self._load.trajectories / seconds,
            "generated_tokens": self.generated,
            "prefilled_tokens": prefilled,
            "reprefilled_tokens": prefilled - self.own_tokens,
            "resent_requests": self.resent,
            "pushes": self.pushes,
            "push_seconds": self.push_s,
        }

    async def _agent(self) -> None:
        load = self._load
        while self._left:
            self._left -= 1
            trajectory = str(self._left)
            headers = self._headers(trajectory)
            # One generator per trajectory: which agent draws next depends on times, and differs between variants.
            rng = random.Random(f"{self._seed}/{trajectory}")
            ids = self._tokens(load.prompt, rng)
            for turn in range(load.turns):
                ids += await self._turn(ids, headers, rng.randint(load.response // 4, 7 * load.response // 4))
                if turn + 1 < load.turns:
                    await asyncio.sleep(rng.uniform(0, 2 * load.tool_s))
                    ids += self._tokens(load.tool_tokens, rng)

    def _tokens(self, count: int, rng: random.Random) -> list[int]:
        self.own_tokens += count
        return [rng.randint(6, 500) for _ in range(count)]

    def _headers(self, trajectory: str) -> dict[str, str]:
        if self._variant == "trajectory":
            return {**HEADERS, "x-april-trajectory": f"{self._name}-{trajectory}"}
        return HEADERS if self._variant == "attached" else {}

    async def _turn(self, prompt: list[int], headers: dict[str, str], length: int) -> list[int]:
        """The response, in as many requests as the variant needs."""
        drawn: list[int] = []
        while len(drawn) < length:
            while not self._may_ask.is_set():
                await self._may_ask.wait()
            params = {"max_new_tokens": length - len(drawn), "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": prompt + drawn, "sampling_params": params, "return_logprob": True}
            try:
                answer = await self._ask(body, headers)
            except EngineError as error:  # aborted before it reached the scheduler
                if self._variant != "resend" or b"abort" not in error.content.lower():
                    raise
                self.resent += 1
                continue
            drawn += answer["output_ids"]
            if len(drawn) < length:
                if answer["meta_info"]["finish_reason"]["type"] != "abort":
                    raise RuntimeError(f"a request ended early: {answer['meta_info']['finish_reason']}")
                self.resent += 1
        self.generated += length
        return drawn

    async def _ask(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        request = asyncio.ensure_future(self._engine.post("/generate", body, headers))
        self._asked.add(request)
        request.add_done_callback(self._asked.discard)
        return await request

    async def _abort_all(self) -> None:
        """Abort all requests and wait for their answers: a pause by `abort` that finds a request sleeps for 1 s."""
        while waiting := set(self._asked):
            await self._engine.abort_all()
            await asyncio.wait(waiting, timeout=ABORT_AGAIN_S)

    async def _push_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._load.push_s)
            began = time.monotonic()
            await self._push(self._checkpoints[(self.pushes + 1) % 2])
            self.push_s += time.monotonic() - began
            self.pushes += 1

    async def _push(self, checkpoint: Path) -> None:
        engine = self._engine
        if self._variant in ATTACHED:
            await engine.post("/april/push/begin", {})
            await engine.load_weights(checkpoint, flush=False)
            await engine.post("/april/push/end", {})
            return
        stock = {"resend": "abort", "in_place": "in_place"}
        self._may_ask.clear()
        if self._variant == "resend":
            await self._abort_all()
        await engine.post("/pause_generation", {"mode": stock[self._variant]})
        await engine.load_weights(checkpoint, flush=self._variant == "resend")
        await self._resume()

    async def _resume(self) -> None:
        """Resume generation after a push, also after one that the end of the row has interrupted."""
        if self._variant in ATTACHED:
            if (await self._engine.get("/april/state"))["push_open"]:
                await self._engine.load_weights(self._checkpoints[0], flush=False)
                await self._engine.post("/april/push/end", {})
            return
        await self._engine.post("/continue_generation", {})
        self._may_ask.set()
