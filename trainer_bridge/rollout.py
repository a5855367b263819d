"""Steps 1 and 6 from the trainer's side: a round asked for, its groups scored from the stream while others generate.

The pool of prompts in the engine is kept full; a group is scored as it finishes. With dynamic sampling it is then
judged (S3): accepted if its rewards differ. A group with fewer than two scored members is replaced by another one.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from sglang_april.client import AprilClient, AprilError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.engine_pool import EnginePool
from trainer_bridge.prompt import TrainingPrompt
from trainer_bridge.rewards import Rewards, RewardSample, Score
from trainer_bridge.samples import ScoredGroup

SCORABLE = 2
"""A baseline needs so many scored members."""
JUDGE_TRIES = 3
"""A server may close a connection that was kept open just as a verdict is sent; telling it again is harmless."""

Key = tuple[str, int, int]
"""Prompt id, incarnation, index of the sample."""


@dataclass(slots=True, eq=False)
class ScoredRollout:
    """What a round brought."""

    summary: RolloutSummary
    groups: list[ScoredGroup] = field(default_factory=list)
    """To train on, in the order of delivery."""
    rejected: int = 0
    """Groups that were judged unfit; delivered, and not trained on."""
    unscored: int = 0
    """Groups with fewer than two scored members; not trained on."""
    replaced: int = 0
    """Of these and the rejected, how many the round was extended for."""
    generate_s: float = 0.0
    reward_wait_s: float = 0.0
    """From the end of the round to the last reward."""
    problems: list[str] = field(default_factory=list)
    """Why samples have no reward, a few."""


@dataclass(slots=True, eq=False)
class _Streamed:
    """A sample as it came, with the scores of the part that it came in."""

    group: RolloutGroup
    at: int
    scores: "Future[list[Score]]"


class RolloutDriver:
    """The rounds of one run. `pending` are the prompts handed over and not wholly delivered."""

    def __init__(
        self,
        client: AprilClient | EnginePool,
        run: str,
        data: PromptData,
        rewards: Rewards,
        config: Config,
        store: Checkpoints,
    ) -> None:
        self._client, self._run, self._data, self._rewards = client, run, data, rewards
        self._config, self._store = config, store
        self.pending: dict[str, TrainingPrompt] = {}
        self.homes: dict[str, int] = {}
        """Of each of them, the engine that it was handed to."""
        self.engines = len(client.clients) if isinstance(client, EnginePool) else 1
        self.held: set[int] = set()
        """The engines that have what is pending with them; a new engine without a journal has not."""
        self._lock = threading.Lock()

    def restore(self, ids: Sequence[str], homes: Sequence[int] = ()) -> None:
        """After a restart: what a checkpoint says is pending, and where."""
        self.pending = {prompt_id: self._data.find(prompt_id) for prompt_id in ids}
        self.homes = dict(zip(ids, homes or [0] * len(ids), strict=True))

    def round(self, round_id: str, quota: int | None, *, full: bool = True) -> ScoredRollout:
        """One round to its end. `full`: the pool is filled up first. A failure changes nothing here.

        Asked for again under its `round_id` it brings what it brought before and generates nothing (S8).
        """
        before, homes, position = dict(self.pending), dict(self.homes), self._data.position
        try:
            return _Round(self, round_id, quota, full).run()
        except BaseException:
            self.pending, self.homes, self._data.position = before, homes, position
            raise

    def _take(self, count: int) -> list[TrainingPrompt]:
        with self._lock:
            taken = self._data.take(count)
            for prompt in taken:
                self._place(prompt)
            return taken

    def _place(self, prompt: TrainingPrompt) -> None:
        """The engine with the fewest pending prompts gets it; the same one whenever this is asked for again."""
        load = Counter(self.homes.values())
        self.homes[prompt.id] = min(range(self.engines), key=lambda engine: load[engine])
        self.pending[prompt.id] = prompt

    def forget(self, prompt_id: str) -> None:
        """A prompt is not in the engine any longer."""
        self.pending.pop(prompt_id, None)
        self.homes.pop(prompt_id, None)

    def prompt_body(self, prompt: TrainingPrompt) -> dict[str, Any]:
        """The prompt as it is handed over."""
        body = prompt.body(self._config.n_samples_per_prompt)
        return body if self.engines == 1 else {**body, "engine": self.homes[prompt.id]}

    def body(self, round_id: str, prompts: list[TrainingPrompt], quota: int | None) -> dict[str, Any]:
        """The request. It follows from checkpoint and configuration alone, so that it can be asked again."""
        config = self._config
        return {
            "run": self._run,
            "round_id": round_id,
            "prompts": [self.prompt_body(prompt) for prompt in prompts],
            "sampling_params": config.rollout_params,
            "quota": quota,
            "quota_unit": config.quota_unit,
            "count": "accepted" if config.dynamic_sampling and quota is not None else "finished",
            "kv": config.kv,
            "max_staleness": config.staleness_bound,
            "after_quota": config.after_quota,
            "quota_mode": config.quota_mode,
            "cohort_rounds": config.cohort_rounds,
            "concurrency": config.rollout_concurrency,
            "proximal": config.proximal == "engine",
            "keep_until_ack": True,
        }


class _Round:
    """One round while it is open: events, scores and verdicts arrive on threads of their own."""

    def __init__(self, rollouts: RolloutDriver, round_id: str, quota: int | None, full: bool) -> None:
        self._all, self._id, self._quota, self._full = rollouts, round_id, quota, full
        self._config, self._client = rollouts._config, rollouts._client
        self._streamed: dict[Key, _Streamed] = {}
        self._events: queue.SimpleQueue[RolloutGroup | RolloutSummary | BaseException] = queue.SimpleQueue()
        self._failed = False
        """A verdict was lost: nothing more is read or judged."""
        self._judge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._verdicts: dict[tuple[str, int], Future[None]] = {}
        self._extended = rollouts._store.extended(round_id)
        self._again: list[TrainingPrompt] = []
        """Replacements that the round may have been extended by before it was asked for again, not yet needed now."""
        self._replaced = 0
        self._judges = self._config.dynamic_sampling and quota is not None

    def run(self) -> ScoredRollout:
        config, rollouts = self._config, self._all
        missing = max(0, config.pool - len(rollouts.pending)) if self._full else 0
        new = {prompt.id for prompt in rollouts._take(missing)}
        known = set(range(rollouts.engines)) <= rollouts.held
        prompts = [p for i, p in rollouts.pending.items() if i in new or rollouts.homes[i] not in rollouts.held]
        if known:
            self._again = rollouts._take(len(self._extended))
        self._extended = self._extended if known else []
        started = time.monotonic()
        with self._judge:
            summary = self._stream(rollouts.body(self._id, prompts, self._quota))
            ended = time.monotonic()
            made = self._deliver(summary)
        rollouts.held = set(range(rollouts.engines))
        made.generate_s, made.reward_wait_s = ended - started, time.monotonic() - ended
        made.replaced = self._replaced
        return made

    def _stream(self, body: dict[str, Any]) -> RolloutSummary:
        """All events to the summary. A thread reads them, so that a lost verdict, which they wait for, ends this."""
        threading.Thread(target=self._follow, args=(self._client.stream(**body),), daemon=True, name="round").start()
        while True:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, RolloutSummary):
                return event
            self._score(event)

    def _follow(self, stream: Iterator[RolloutGroup | RolloutSummary]) -> None:
        try:
            for event in stream:
                self._events.put(event)
                if self._failed or isinstance(event, RolloutSummary):
                    return
            raise AprilError(500, "stream", f"round {self._id} ended without its summary")
        except BaseException as error:  # noqa: BLE001 - raised where the events are read
            self._events.put(error)

    def _score(self, group: RolloutGroup) -> None:
        """Rewards of the samples of one event; then the verdict, if this group is judged."""
        told = [RewardSample(s.text, s.output_ids.tolist(), s.finish_reason, s.index) for s in group.samples]
        prompt = self._all.pending.get(group.id) or self._all._data.find(group.id)
        scores = self._all._rewards.submit(told, prompt)
        for at, sample in enumerate(group.samples):
            self._streamed[group.id, group.incarnation, sample.index] = _Streamed(group, at, scores)
        if group.complete and self._config.quota_unit == "group" and self._quota is not None:
            verdict = self._judge.submit(self._settle, group, scores)
            self._verdicts[group.id, group.incarnation] = verdict

    def _settle(self, group: RolloutGroup, scores: "Future[list[Score]]") -> None:
        """On the judge's thread, in the order of finishing."""
        if self._failed:
            return
        try:
            self._decide(group, scores)
        except BaseException as error:
            self._failed = True
            self._events.put(error)
            raise

    def _decide(self, group: RolloutGroup, scores: "Future[list[Score]]") -> None:
        rewards = [score.reward for score in scores.result() if score.reward is not None]
        fit = len(rewards) >= min(SCORABLE, len(group.samples))
        if self._judges:
            fit = fit and max(rewards) > min(rewards)
        # Extended before it is judged: a verdict may end the round.
        if not fit and self._extend(quota_add=0 if self._judges else 1):
            self._replaced += 1
        if self._judges:
            self._tell_verdict(accept=[group.id] if fit else [], reject=[] if fit else [group.id])

    def _tell_verdict(self, **verdict: list[str]) -> None:
        for left in reversed(range(JUDGE_TRIES)):
            try:
                self._tell(self._client.judge, **verdict)
                return
            except httpx.TransportError:
                if not left:
                    raise

    def _extend(self, quota_add: int) -> bool:
        """One more prompt, and unless the verdict already holds the round open, one more group in the quota."""
        if self._again:
            # Sent once more, for nobody knows whether it arrived. An engine that has it refuses, and changes nothing.
            again = self._all.prompt_body(self._again.pop(0))
            self._tell(self._client.extend, quota_add=quota_add, prompts=[again])
            return True
        with self._all._lock:
            position = self._all._data.position
            prompt = self._all._data.take(1)[0]
            self._all._place(prompt)
        self._extended.append(prompt.id)
        self._all._store.note_extended(self._id, self._extended)
        if self._tell(self._client.extend, quota_add=quota_add, prompts=[self._all.prompt_body(prompt)]):
            return True
        self._extended.pop()
        self._all._store.note_extended(self._id, self._extended)
        self._all.forget(prompt.id)
        self._all._data.position = position
        return False

    def _tell(self, call: Any, **body: Any) -> bool:
        """False where the round has ended meanwhile: then nothing was changed."""
        try:
            call(self._id, **body)
        except AprilError as error:
            if error.status == 409:
                return False
            raise
        return True

    def _deliver(self, summary: RolloutSummary) -> ScoredRollout:
        made = ScoredRollout(summary)
        for named in summary.delivered:
            parts = [self._streamed[named["id"], named["incarnation"], index] for index in named["indices"]]
            scored = _assemble(parts, named)
            verdict = self._verdicts.get((named["id"], named["incarnation"]))
            if verdict is not None:
                verdict.result()
            made.problems += [score.problem for score in scored.scores if score.problem]
            if named["accepted"] is False:
                made.rejected += 1
            elif scored.scored < min(SCORABLE, self._config.n_samples_per_prompt) and scored.group.complete:
                made.unscored += 1
            else:
                made.groups.append(scored)
            if named["complete"]:
                self._all.forget(named["id"])
        return made


def _assemble(parts: list[_Streamed], named: dict[str, Any]) -> ScoredGroup:
    """The samples that were delivered together, with their scores; waits for these."""
    samples = [part.group.samples[part.at] for part in parts]
    group = replace(parts[0].group, samples=samples, complete=named["complete"], accepted=named["accepted"])
    return ScoredGroup(group, [part.scores.result()[part.at] for part in parts])
