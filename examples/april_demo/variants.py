"""The three ways to run a round, behind one small interface.

- `Synchronous` starts the groups of a round and waits for all of them.
- `Outside` is APRIL from outside the engine, at its best: one HTTP request per group, the client counts, one abort as
  soon as enough groups have finished, token ids (not text) sent again in the next round, first in, first out, and
  finished surplus kept rather than dropped.
- `April` is one request to the engine per round.

They share one engine and take turns, each with pushes of its own: a version is the number of the variant's own pushes.

All three ask for logprobs, because a trainer needs them. Stock sampling ignores seeds without SGLang's deterministic
mode, so the same prompts and seeds give the same samples only under `April`; the lengths are the task's anyway.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from examples.april_demo.engine import Engine
from examples.april_demo.settings import Settings
from examples.sorting_task import Problem, problems

ABORT_AGAIN_S = 0.05
"""An aborted request answers within a step; what has not by then had not reached the engine."""


@dataclass
class Sample:
    """One response: its tokens, and the version that drew each of them."""

    output_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    done: bool = False

    def extend(self, tokens: list[int], version: int) -> None:
        self.output_ids += tokens
        self.versions += [version] * len(tokens)


@dataclass
class Group:
    """The samples of one prompt."""

    problem: Problem
    samples: list[Sample]
    finished_at: float = 0.0
    """The server's clock when its last sample finished (0 where the engine itself counts)."""

    @property
    def done(self) -> bool:
        """Whether all samples have finished."""
        return all(sample.done for sample in self.samples)


@dataclass
class Round:
    """What one round delivered, and what it cost."""

    version: int
    groups: list[Group]
    reprefilled_tokens: int = 0
    ended_at: float | None = None
    """The server's clock when the last needed group finished, if samples were still running then."""
    tokens_after_end: int | None = None
    """The engine's own count, where it has one."""
    stats: dict[str, Any] = field(default_factory=dict)


class Variant(Protocol):
    """One way to run rounds. `handed_over` counts the groups that it took from the stream of prompts."""

    name: str
    handed_over: int

    async def push(self, checkpoint: Path) -> None:
        """Brings the next policy version."""

    async def round(self) -> Round:
        """Runs a round that delivers `settings.groups` groups."""

    async def drain(self) -> Round:
        """Finishes and delivers all that is still carried."""


class Feed:
    """The stream of prompts: the same problems in the same order for every variant."""

    def __init__(self, settings: Settings) -> None:
        self._problems: Iterator[Problem] = problems(settings.seed, settings.lengths)
        self.taken = 0

    def take(self, count: int) -> list[Problem]:
        """The next problems."""
        self.taken += count
        return [next(self._problems) for _ in range(count)]


class _Stock:
    """What the two variants on SGLang's own routes share: versions counted here, a group as one batch request."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._feed = Feed(settings)
        self._version = 0
        self._reprefilled = 0

    @property
    def handed_over(self) -> int:
        """Groups taken from the stream."""
        return self._feed.taken

    async def push(self, checkpoint: Path) -> None:
        """SGLang's weight call with its defaults: it waits for running requests and flushes the cache."""
        await self._engine.load_weights(checkpoint)
        self._version += 1

    def _new_groups(self, count: int) -> list[Group]:
        per_group = self._settings.samples_per_group
        return [Group(problem, [Sample() for _ in range(per_group)]) for problem in self._feed.take(count)]

    async def _generate(self, group: Group) -> Group:
        """One request for the unfinished samples of a group; returns when all have finished or were aborted."""
        open_samples = [sample for sample in group.samples if not sample.done]
        budget = self._settings.max_new_tokens
        body = {
            "input_ids": [group.problem.prompt + sample.output_ids for sample in open_samples],
            "sampling_params": [
                {"temperature": self._settings.temperature, "max_new_tokens": budget - len(sample.output_ids)}
                for sample in open_samples
            ],
            "return_logprob": True,
            "logprob_start_len": -1,
        }
        for sample, answer in zip(open_samples, await self._engine.post("/generate", body), strict=True):
            meta = answer["meta_info"]
            # A request aborted before its prefill reports no cached tokens, and cost none.
            if sample.output_ids and "cached_tokens" in meta:
                self._reprefilled += meta["prompt_tokens"] - meta["cached_tokens"]
            sample.extend(answer["output_ids"], self._version)
            sample.done = meta["finish_reason"]["type"] != "abort"
            group.finished_at = max(group.finished_at, meta.get("response_sent_to_client_ts", 0.0))
        return group

    def _delivered(self, groups: list[Group], ended_at: float | None) -> Round:
        cost, self._reprefilled = self._reprefilled, 0
        return Round(self._version, groups, cost, ended_at)

    async def _finish(self, groups: list[Group]) -> Round:
        await asyncio.gather(*map(self._generate, groups))
        return self._delivered(groups, None)


class Synchronous(_Stock):
    """All groups of a round are started; the round ends when the last has finished."""

    name = "synchronous"

    async def round(self) -> Round:
        """Starts exactly what it needs and waits for all of it."""
        return await self._finish(self._new_groups(self._settings.groups))

    async def drain(self) -> Round:
        """Nothing is ever carried."""
        return self._delivered([], None)


class Outside(_Stock):
    """APRIL from outside: over-provision, count in the client, abort over HTTP, send tokens again."""

    name = "outside"

    def __init__(self, engine: Engine, settings: Settings) -> None:
        super().__init__(engine, settings)
        self._partials: list[Group] = []
        self._surplus: list[Group] = []

    async def round(self) -> Round:
        """Partials first, then new groups, more than are needed; one abort when enough have finished."""
        settings = self._settings
        needed = settings.groups - len(self._surplus)
        if needed <= 0:
            return self._delivered(self._take_surplus(self._surplus), None)
        new = max(0, math.ceil(settings.over_provision * settings.groups) - len(self._partials) - len(self._surplus))
        started = self._partials + self._new_groups(new)
        pending = {asyncio.create_task(self._generate(group)) for group in started}
        finished = 0
        while finished < needed and pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            finished += sum(task.result().done for task in done)
        left_over = bool(pending)
        await self._abort(pending)
        whole = sorted((group for group in started if group.done), key=lambda group: group.finished_at)
        ended_at = whole[needed - 1].finished_at if left_over else None
        self._partials = [group for group in started if not group.done]
        return self._delivered(self._take_surplus(self._surplus + whole), ended_at)

    async def _abort(self, pending: set[asyncio.Task[Group]]) -> None:
        """One abort ends all that the engine has. What was on its way would run to its end: it is aborted again."""
        while pending:
            await self._engine.post("/abort_request", {"rid": "", "abort_all": True})
            _, pending = await asyncio.wait(pending, timeout=ABORT_AGAIN_S)

    def _take_surplus(self, whole: list[Group]) -> list[Group]:
        """What this round delivers; the rest is first in the next."""
        quota = self._settings.groups
        self._surplus = whole[quota:]
        return whole[:quota]

    async def drain(self) -> Round:
        """Sends what is left once more and waits for all of it."""
        surplus, rest, self._surplus, self._partials = self._surplus, self._partials, [], []
        last = await self._finish(rest)
        last.groups += surplus
        return last


class April:
    """One request per round; the engine counts, stops, keeps and resumes."""

    name = "april"
    READY_QUOTAS = 3
    """So many quotas of groups lie in the engine at a round's start. They cost nothing until a slot is free."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self._feed = Feed(settings)
        self._run = f"demo-{uuid.uuid4().hex[:8]}"
        self._known: dict[str, Problem] = {}
        self._pushed: list[int] = []
        """The engine's version after each push of ours."""

    @property
    def handed_over(self) -> int:
        """Groups taken from the stream."""
        return self._feed.taken

    async def push(self, checkpoint: Path) -> None:
        """The cache need not be flushed: the version is in every request's cache key."""
        await self._engine.post("/april/push/begin", {})
        await self._engine.load_weights(checkpoint, flush_cache=False)
        ended = await self._engine.post("/april/push/end", {})
        self._pushed.append(ended["policy_version"])

    async def round(self) -> Round:
        """Hands over new prompts in place of the delivered ones and asks for the quota."""
        missing = self.READY_QUOTAS * self._settings.groups - len(self._known)
        return await self._rollout(self._feed.take(max(0, missing)), self._settings.groups)

    async def drain(self) -> Round:
        """A round without a quota ends when everything has finished."""
        return await self._rollout([], None)

    async def _rollout(self, new: list[Problem], quota: int | None) -> Round:
        settings = self._settings
        self._known |= {problem.id: problem for problem in new}
        body = {
            "run": self._run,
            "prompts": [{"id": one.id, "input_ids": one.prompt, "n": settings.samples_per_group} for one in new],
            "sampling_params": {
                "temperature": settings.temperature,
                "max_new_tokens": settings.max_new_tokens,
                "sampling_seed": settings.seed,
            },
            "quota": quota,
            "quota_unit": "group",
            # The engine's version moves at the other variants' pushes too.
            "max_staleness": settings.max_staleness * len(settings.variants),
        }
        reply = await self._engine.post("/april/rollout", body)
        groups = [self._group(finished) for finished in reply["finished"]]
        stats = reply["stats"]
        cost = {"reprefilled_tokens": stats["reprefilled_tokens"], "tokens_after_end": stats["tokens_after_quota"]}
        return Round(self._own(reply["policy_version"]), groups, **cost, stats=stats)

    def _own(self, version: int) -> int:
        return bisect_right(self._pushed, version)

    def _group(self, finished: dict[str, Any]) -> Group:
        samples = []
        for answer in finished["samples"]:
            sample = Sample(done=True)
            for span in answer["spans"]:
                sample.extend(answer["output_ids"][span["start"] : span["end"]], self._own(span["version"]))
            samples.append(sample)
        return Group(self._known.pop(finished["id"]), samples)


VARIANTS: dict[str, type[Synchronous | Outside | April]] = {kind.name: kind for kind in (Synchronous, Outside, April)}
