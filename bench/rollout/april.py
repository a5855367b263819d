"""The batch quota: one request per round; the engine counts, stops, suspends and resumes."""

import uuid
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

from bench.rollout.engine_client import EngineClient
from bench.rollout.variant import DeliveredGroup, Plan, RoundResult
from bench.rollout.workload import Stream, WorkloadPrompt
from sglang_april.client import types

LEGS = ("started", "resumed_recomputed")
READY = 4
"""Prompts in the engine at the start of a round, in quotas (at least two samples per slot). They cost nothing until a
slot is free. With three, all of them run before a paced round ends, and slots stay empty."""


class April:
    """One run on the patched server. Versions count the pushes of this run, because several runs share the engine."""

    name = ""
    kv = "keep"
    after_quota = "suspend"
    by_factor = False
    """Whether the plan's over-sampling factor sets the number of prompts, as for client-side baselines."""

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None:
        self.engine, self.plan, self.stream = engine, plan, stream
        self.delivered: Counter[str] = Counter()
        self.held = 0
        self._run = f"bench-{uuid.uuid4().hex[:8]}"
        self._open: dict[str, WorkloadPrompt] = {}
        self._pushed: list[int] = []
        """The engine's version after each push of this run; the next reply reports it."""

    @property
    def handed_over(self) -> int:
        """Prompts taken from the stream."""
        return self.stream.taken

    async def push(self, checkpoint: Path) -> None:
        """Push the whole policy in one weight call, as in the other variants.

        No flush is needed: the version is part of every cache key, and a push evicts old prefixes.
        """
        await self.engine.load_weights(checkpoint, flush=False)
        if self.plan.max_staleness:
            self._note((await self.engine.get("/april/state"))["policy_version"])

    async def round(self) -> RoundResult:
        """A round with new prompts in place of the delivered ones."""
        plan = self.plan
        ready = max(READY * plan.groups, -(-2 * plan.slots // plan.n))
        new = self.stream.take((round(plan.over_sampling * plan.groups) if self.by_factor else ready) - len(self._open))
        quota = self.plan.samples if self.plan.unit == "sample" else self.plan.groups
        return await self._rollout(new, quota)

    async def drain(self) -> RoundResult:
        """A round without a quota ends when everything has finished."""
        return await self._rollout([], None)

    async def rest(self) -> None:
        """Does nothing: no sample runs between rounds."""

    def _body(self, new: list[WorkloadPrompt], quota: int | None, after_quota: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "run": self._run,
            "prompts": [
                {
                    "id": prompt.id,
                    "input_ids": prompt.input_ids,
                    "n": len(prompt.lengths),
                    "sampling_params": {"max_new_tokens": prompt.lengths},
                }
                for prompt in new
            ],
            "sampling_params": {"temperature": 1.0, "ignore_eos": True},
            "quota": quota,
            "quota_unit": self.plan.unit,
            "kv": self.kv,
            "max_staleness": self._bound(),
        }
        if self.plan.concurrency is not None:
            body["concurrency"] = self.plan.concurrency
        if self.plan.quota_mode != "first":
            body["quota_mode"] = self.plan.quota_mode
        if after_quota != "suspend" and quota is not None:
            body["after_quota"] = after_quota
        return body

    def _bound(self) -> int | None:
        """The staleness bound in engine versions, which pushes of other runs advance too."""
        bound = self.plan.max_staleness
        if bound is None or bound == 0:
            return bound
        older = self._pushed[-1 - bound] if len(self._pushed) > bound else 0
        return max(bound, self._pushed[-1] - older) if self._pushed else bound

    def _note(self, version: int) -> None:
        if version not in self._pushed[-1:]:
            self._pushed.append(version)

    async def _rollout(
        self, new: list[WorkloadPrompt], quota: int | None, after_quota: str | None = None
    ) -> RoundResult:
        self._open |= {prompt.id: prompt for prompt in new}
        body = self._body(new, quota, after_quota or self.after_quota)
        if self.plan.filtered and quota is not None:
            return await self._judged(body)
        reply = await self.engine.rollout(body)
        return self._round(reply.policy_version, reply.finished, reply.carried, reply.stats)

    async def _judged(self, body: dict[str, Any]) -> RoundResult:
        """A round that counts accepted groups; each group is judged as soon as it has finished."""
        body |= {"count": "accepted", "round_id": uuid.uuid4().hex}
        groups: dict[tuple[str, int], types.RolloutGroup] = {}
        async for event in self.engine.stream(body):
            if isinstance(event, types.RolloutSummary):
                delivered = [groups[one["id"], one["incarnation"]] for one in event.delivered]
                return self._round(event.policy_version, delivered, event.carried, event.stats)
            groups[event.id, event.incarnation] = event
            verdict = "reject" if self._open[event.id].rejected else "accept"
            await self.engine.post(f"/april/rounds/{body['round_id']}/judge", {verdict: [event.id]})
        raise RuntimeError("the stream ended without a summary")

    def _round(
        self, version: int, finished: list[types.RolloutGroup], carried: dict[str, Any], stats: dict[str, Any]
    ) -> RoundResult:
        self._note(version)
        self.held = carried["samples"]
        groups = [self._group(group, version) for group in finished]
        ahead = stats.get("ahead") or dict.fromkeys(("tokens_generated", "reprefilled_tokens", *LEGS), 0)
        return RoundResult(
            self._own(version),
            groups,
            generated=stats["tokens_generated"] + ahead["tokens_generated"],
            wasted=sum(sum(group.lengths) for group in groups if group.rejected),
            carry=carried["tokens"] + carried["finished_tokens"],
            reprefilled=stats["reprefilled_tokens"] + ahead["reprefilled_tokens"],
            after_end=stats["tokens_after_quota"],
            legs=sum(stats[leg] + ahead[leg] for leg in LEGS),
            prolonged=stats["prolonged"],
            bytes_by_tier=carried["bytes"],
        )

    def _group(self, group: types.RolloutGroup, version: int) -> DeliveredGroup:
        prompt = self._open[group.id]
        self.delivered.update(f"{group.id}/{sample.index}" for sample in group.samples)
        if group.complete:
            del self._open[group.id]
        spans = [span for sample in group.samples for span in sample.spans]
        return DeliveredGroup(
            group.id,
            [len(sample.output_ids) for sample in group.samples],
            rejected=self.plan.filtered and prompt.rejected,
            oldest_version=self._own(min((span.version for span in spans), default=version)),
            off_policy=sum(span.end - span.start for span in spans if span.version < version),
            hybrid=sum(span.end - span.start for span in spans if span.version == version and span.kv == "kept"),
        )

    def _own(self, version: int) -> int:
        return bisect_right(self._pushed, version)


class AprilKeep(April):
    """Partials resume on their stored KV."""

    name = "april-keep"


class AprilRecompute(April):
    """Partials are prefilled again under the new weights."""

    name = "april-recompute"
    kv = "recompute"


class AprilAuto(April):
    """Each partial keeps or recomputes its KV, whichever costs less."""

    name = "april-auto"
    kv = "auto"


class AprilFactor(April):
    """Keep, with a fixed over-sampling factor instead of demand-driven admission (ablation)."""

    name = "april-factor"
    by_factor = True


class AprilContinue(April):
    """The engine generates ahead while the trainer works."""

    name = "april-continue"
    after_quota = "continue"

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None:
        super().__init__(engine, plan, stream)
        self._held: RoundResult | None = None

    async def rest(self) -> None:
        """Suspend what runs ahead by a round of one group, which the next round delivers."""
        self._held = await self._rollout([], 1, after_quota="suspend")

    async def round(self) -> RoundResult:
        """As in the other variants."""
        done = await super().round()
        held, self._held = self._held, None
        if held is not None:
            done.groups = held.groups + done.groups
        return done
