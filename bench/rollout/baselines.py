"""Rounds on stock SGLang: wait for all, or client-side APRIL.

Each request carries the unfinished samples of one group. The client counts versions, because SGLang 0.5.17 reports
none.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.rollout.engine_client import EngineClient
from bench.rollout.variant import DeliveredGroup, Plan, RoundResult
from bench.rollout.workload import Stream, WorkloadPrompt


@dataclass
class RequestLeg:
    """Part of a response: the tokens that one request drew under one version."""

    version: int
    tokens: int


@dataclass
class OpenGroup:
    """A group in progress: the tokens of each of its responses so far."""

    prompt: WorkloadPrompt
    output_ids: list[list[int]] = field(default_factory=list)
    legs: list[list[RequestLeg]] = field(default_factory=list)
    started: int = 0
    """Version of its first request."""
    finished_at: float = math.inf

    def __post_init__(self) -> None:
        self.output_ids = [[] for _ in self.prompt.lengths]
        self.legs = [[] for _ in self.prompt.lengths]

    @property
    def pending(self) -> list[int]:
        """Indices of the responses that have not reached their length."""
        return [i for i, target in enumerate(self.prompt.lengths) if len(self.output_ids[i]) < target]

    @property
    def tokens(self) -> int:
        """Output tokens so far."""
        return sum(map(len, self.output_ids))

    def delivered(self, version: int, hybrid: bool) -> DeliveredGroup:
        """The group for the trainer; `hybrid`: whether later legs reuse KV of earlier ones."""
        legs = [leg for parts in self.legs for leg in parts]
        old = sum(leg.tokens for leg in legs if leg.version < version)
        on_old_kv = sum(leg.tokens for parts in self.legs for leg in parts[1:] if leg.version == version)
        return DeliveredGroup(
            self.prompt.id,
            [len(ids) for ids in self.output_ids],
            oldest_version=min((leg.version for leg in legs), default=version),
            off_policy=old,
            hybrid=on_old_kv if hybrid else 0,
        )


class ClientSideBaseline:
    """Base of the variants that use SGLang's own routes."""

    name = ""
    flush_on_push = True

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None:
        self.engine, self.plan, self.stream = engine, plan, stream
        self.delivered: Counter[str] = Counter()
        self.version = 0
        self._round = RoundResult(0, [])

    @property
    def handed_over(self) -> int:
        """Prompts taken from the stream."""
        return self.stream.taken

    @property
    def held(self) -> int:
        """Number of samples handed over and not yet delivered."""
        return self.plan.n * len(self._undelivered)

    @property
    def _undelivered(self) -> Sequence[OpenGroup]:
        return ()

    async def push(self, checkpoint: Path) -> None:
        """Push in one weight call with SGLang's default, which flushes the cache."""
        await self.engine.load_weights(checkpoint, flush=self.flush_on_push)
        self.version += 1

    async def rest(self) -> None:
        """Does nothing: no request runs between rounds."""

    def _new(self, count: int) -> list[OpenGroup]:
        return [OpenGroup(prompt, started=self.version) for prompt in self.stream.take(count)]

    async def _generate(self, group: OpenGroup) -> OpenGroup:
        """One request for the unfinished responses of a group; returns when all have finished or were aborted."""
        wanted = group.pending
        before = [len(group.output_ids[i]) for i in wanted]
        body = {
            "input_ids": [group.prompt.input_ids + group.output_ids[i] for i in wanted],
            "sampling_params": [
                {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": group.prompt.lengths[i] - had}
                for i, had in zip(wanted, before, strict=True)
            ],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        answers = await self.engine.post("/generate", body)
        for i, had, answer in zip(wanted, before, answers, strict=True):
            self._take(group, i, had, answer)
        if not group.pending:
            group.finished_at = time.monotonic()
        return group

    def _take(self, group: OpenGroup, index: int, had: int, answer: dict[str, Any]) -> None:
        meta, ids = answer["meta_info"], answer["output_ids"]
        # A request that was aborted before its prefill reports no cached tokens, and cost none.
        if had and "cached_tokens" in meta and self._round.reprefilled is not None:
            self._round.reprefilled += meta["prompt_tokens"] - meta["cached_tokens"]
        if ids:
            self._round.legs += 1
            if self._round.generated is not None:
                self._round.generated += len(ids)
            group.output_ids[index] += ids
            group.legs[index].append(RequestLeg(self.version, len(ids)))

    def _begin(self) -> None:
        self._round = RoundResult(self.version, [], generated=0)

    def _end(self, whole: list[OpenGroup], carry: int, hybrid: bool = False) -> RoundResult:
        done = self._round
        done.version = self.version
        done.groups = [group.delivered(self.version, hybrid) for group in whole]
        done.carry = carry
        for group in whole:
            self.delivered.update(f"{group.prompt.id}/{i}" for i in range(len(group.prompt.lengths)))
        return done

    def _reject(self, groups: list[OpenGroup]) -> list[OpenGroup]:
        """`dapo`: drop groups without a signal and count their tokens as wasted."""
        if not self.plan.filtered:
            return groups
        for group in groups:
            if group.prompt.rejected:
                self._round.wasted += group.tokens
                self.delivered.update(f"{group.prompt.id}/{i}" for i in range(len(group.prompt.lengths)))
        return [group for group in groups if not group.prompt.rejected]


class Synchronous(ClientSideBaseline):
    """Starts all groups of a round and waits for the last one."""

    name = "synchronous"

    async def round(self) -> RoundResult:
        """Start the quota, replace rejected groups one by one, and wait for all."""
        self._begin()
        whole: list[OpenGroup] = []
        pending = {asyncio.ensure_future(self._generate(group)) for group in self._new(self.plan.groups)}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            kept = self._reject([task.result() for task in done])
            whole += kept
            pending |= {asyncio.ensure_future(self._generate(group)) for group in self._new(len(done) - len(kept))}
        return self._end(whole, 0)

    async def drain(self) -> RoundResult:
        """Does nothing: this variant carries no sample."""
        self._begin()
        return self._end([], 0)


class Outside(ClientSideBaseline):
    """Client-side APRIL, as fast as it can be: over-sample, count in the client, abort once, resend token ids in FIFO
    order, and keep finished surplus."""

    name = "outside"
    abort_again_s = 0.05
    """Delay before a second abort, for requests that had not reached the engine. Others answer within a step."""
    hybrid = False

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None:
        super().__init__(engine, plan, stream)
        self._partials: list[OpenGroup] = []
        self._surplus: list[OpenGroup] = []

    async def round(self) -> RoundResult:
        """Start partials and then new groups up to the over-sampling factor; abort when the quota has finished."""
        self._begin()
        quota, needed = self.plan.groups, self.plan.groups - len(self._surplus)
        if needed <= 0:
            whole, self._surplus = self._surplus[:quota], self._surplus[quota:]
            return self._end(whole, self._carry(), self.hybrid)
        target = math.ceil(self.plan.over_sampling * quota)
        started = self._partials + self._new(target - len(self._partials) - len(self._surplus))
        pending = {asyncio.ensure_future(self._generate(group)) for group in started}
        kept = 0
        while kept < needed and pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            passed = self._reject([task.result() for task in done])
            kept += len(passed)
            replaced = self._new(len(done) - len(passed)) if kept < needed else []
            started += replaced
            pending |= {asyncio.ensure_future(self._generate(group)) for group in replaced}
        seen = {id(group) for group in started if not group.pending}
        await self._abort(pending)
        late = self._reject([group for group in started if not group.pending and id(group) not in seen])
        whole = [g for g in started if id(g) in seen and not (self.plan.filtered and g.prompt.rejected)] + late
        whole = self._surplus + sorted(whole, key=lambda group: group.finished_at)
        self._partials = [group for group in started if group.pending]
        self._surplus = whole[quota:]
        return self._end(whole[:quota], self._carry(), self.hybrid)

    async def _abort(self, pending: set[asyncio.Task[OpenGroup]]) -> None:
        """Read the counters together with the first abort. Tokens computed between the last finish and the moment at
        which the client sees it are not counted, in favour of this variant."""
        if not pending:
            return
        counters = asyncio.ensure_future(self.engine.counters())
        while pending:
            await self.engine.abort_all()
            _, pending = await asyncio.wait(pending, timeout=self.abort_again_s)
        self._round.decoded_at_end = (await counters).decoded

    @property
    def _undelivered(self) -> Sequence[OpenGroup]:
        return self._partials + self._surplus

    def _carry(self) -> int:
        return sum(group.tokens for group in self._undelivered)

    async def drain(self) -> RoundResult:
        """Send all remaining groups again and wait for them."""
        self._begin()
        rest, self._partials = self._partials, []
        done = self._reject(list(await asyncio.gather(*map(self._generate, rest))))
        surplus, self._surplus = self._surplus, []
        return self._end(surplus + done, 0, self.hybrid)


class OutsideRetry(Outside):
    """`Outside` with the round end of slime (`abort_server_until_idle` in slime/backends/sglang_utils/server_control.py
    of THUDM/slime, commit 15b8e50): abort, query the load, and repeat every three seconds until it is zero. An aborted
    request stays in the batch for one more step."""

    name = "outside-retry3s"
    abort_again_s = 3.0

    async def _abort(self, pending: set[asyncio.Task[OpenGroup]]) -> None:
        counters = await self.engine.counters()
        while True:
            await self.engine.abort_all()
            load = await self.engine.counters()
            if not load.running + load.waiting:
                break
            await asyncio.sleep(self.abort_again_s)
        if pending:
            await asyncio.wait(pending)
        self._round.decoded_at_end = counters.decoded


class StaleReuse(Outside):
    """`Outside` without a flush on a push: resent requests reuse KV of older weights from the radix tree."""

    name = "stale-reuse"
    flush_on_push = False
    hybrid = True
