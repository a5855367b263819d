"""Collects one round: scores groups as they finish, judges and replaces them, and assembles what is delivered.

A group is scored while others are still generated. With dynamic sampling it is then judged (`verdict-final`): accepted
if its rewards differ. A group with fewer than two scored samples is replaced: the round is extended by a prompt.
"""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_april.client import AprilClient, AprilError
from sglang_april.client.engine_pool import EnginePool
from sglang_april.client.follow import follow
from sglang_april.client.types import RolloutGroup, RolloutSummary
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rewards import Rewards, RewardSample, Score, TrainingPrompt
from trainer_bridge.samples import ScoredGroup, TrainableGroup
from trainer_bridge.validate import check_unusable

MIN_SCORED = 2
"""Scored samples that a group baseline needs."""

SampleKey = tuple[str, int, int]
"""Prompt id, incarnation, index of the sample."""


@dataclass(slots=True, eq=False)
class ScoredRollout:
    """The result of a round."""

    summary: RolloutSummary
    groups: list[TrainableGroup] = field(default_factory=list)
    """Groups to train on, in delivery order."""
    rejected: int = 0
    """Delivered groups with a negative verdict; not trained on."""
    unscored: int = 0
    """Groups with fewer than two scored samples; not trained on. None with `quota_unit: sample`."""
    replaced: int = 0
    """Rejected or unscored groups that the round was extended for."""
    generate_s: float = 0.0
    reward_wait_s: float = 0.0
    """From the end of the round to the last reward."""
    problems: list[str] = field(default_factory=list)
    """Why samples have no reward."""


@dataclass(slots=True, eq=False)
class _StreamedSample:
    """A sample at its position in the event that contained it, with the scores of that event."""

    group: RolloutGroup
    position: int
    scores: "Future[list[Score]]"


class RolloutCollector:
    """Collects one round. Events arrive on one thread, scores on others, and verdicts are sent by a third."""

    def __init__(
        self,
        client: AprilClient | EnginePool,
        pool: PromptPool,
        rewards: Rewards,
        store: Checkpoints,
        config: Config,
        round_id: str,
        quota: int | None,
        resend: list[TrainingPrompt],
    ) -> None:
        """`resend`: prompts that an interrupted attempt at this round may have extended it by."""
        self._client, self._pool, self._rewards, self._store, self._id = client, pool, rewards, store, round_id
        self._config, self._samples_per_prompt, self._resend = config, config.n_samples_per_prompt, list(resend)
        self._whole_groups = config.quota_unit == "group"
        self._replaces = self._whole_groups and quota is not None
        """Whether the round is extended for groups that cannot be trained on."""
        self._judges = config.dynamic_sampling and quota is not None
        """Whether the engine waits for a verdict on every group."""
        self._extensions = [prompt.id for prompt in resend]
        """Ids of all prompts that the round is extended by."""
        self._replaced = 0
        self._streamed: dict[SampleKey, _StreamedSample] = {}
        self._verdicts: dict[tuple[str, int], Future[None]] = {}
        self._judge_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")
        self._events: queue.SimpleQueue[RolloutGroup | RolloutSummary | BaseException] = queue.SimpleQueue()
        self._failed: Future[None] = Future()
        """Done when the round has failed: no further event is read, and no further group is judged."""

    def collect(self, request: dict[str, Any]) -> ScoredRollout:
        """Send the request, and return the round when all delivered samples are scored."""
        started = time.monotonic()
        with self._judge_thread:
            try:
                summary = self._read_events(request)
                ended = time.monotonic()
                rollout = self._assemble_rollout(summary)
            except BaseException:
                self._fail()  # the judge thread, which is joined here, waits for no further reward
                raise
        rollout.generate_s, rollout.reward_wait_s = ended - started, time.monotonic() - ended
        rollout.replaced = self._replaced
        return rollout

    def _read_events(self, request: dict[str, Any]) -> RolloutSummary:
        """Read all events up to the summary. They are streamed on another thread, because the engine waits for
        verdicts: if one is lost, the stream never ends, and its error must end the round."""
        follow(self._events_of(self._client.stream(**request)), self._events.put, "round")
        while True:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, RolloutSummary):
                return event
            self._score(event)

    def _events_of(self, stream: Iterator[RolloutGroup | RolloutSummary]) -> Iterator[RolloutGroup | RolloutSummary]:
        """The events up to the summary, or until the round has failed."""
        for event in stream:
            yield event
            if self._failed.done() or isinstance(event, RolloutSummary):
                return
        raise AprilError(500, "stream", f"round {self._id} ended without its summary")

    def _score(self, group: RolloutGroup) -> None:
        """Submit the samples of an event to the rewards; if the group is complete, judge or replace it afterwards."""
        samples = [RewardSample(s.text, s.output_ids.tolist(), s.finish_reason, s.index) for s in group.samples]
        scores = self._rewards.submit(samples, self._pool.find(group.id))
        for position, sample in enumerate(group.samples):
            self._streamed[group.id, group.incarnation, sample.index] = _StreamedSample(group, position, scores)
        if group.complete and self._replaces:
            verdict = self._judge_thread.submit(self._judge, group, scores)
            self._verdicts[group.id, group.incarnation] = verdict

    # On the judge thread, in the order in which groups finish

    def _judge(self, group: RolloutGroup, scores: "Future[list[Score]]") -> None:
        either: tuple[Future[Any], Future[Any]] = scores, self._failed
        wait(either, return_when=FIRST_COMPLETED)
        if self._failed.done():
            return
        try:
            self._judge_or_replace(group, scores)
        except BaseException as error:
            self._fail()
            self._events.put(error)
            raise

    def _fail(self) -> None:
        with suppress(InvalidStateError):
            self._failed.set_result(None)

    def _judge_or_replace(self, group: RolloutGroup, scores: "Future[list[Score]]") -> None:
        rewards = [score.reward for score in scores.result() if score.reward is not None]
        usable = len(rewards) >= min(MIN_SCORED, len(group.samples))
        if self._judges:
            usable = usable and max(rewards) > min(rewards)
        if not usable:
            problem = next((score.problem for score in scores.result() if score.problem), "all its rewards are equal")
            check_unusable(self._replaced + 1, self._config, problem)
        # The extension precedes the verdict, because a verdict may end the round. A judged group that is rejected does
        # not count, so the quota stays the same; otherwise the quota rises by the group that cannot be trained on.
        if not usable and self._extend(quota_add=0 if self._judges else 1):
            self._replaced += 1
        if self._judges:
            accept, reject = ([group.id], []) if usable else ([], [group.id])
            self._call_if_open(self._client.judge, accept=accept, reject=reject)

    def _extend(self, quota_add: int) -> bool:
        """Add a prompt to the round; False if the round has ended."""
        if self._resend:
            # An earlier attempt may have delivered it. An engine that has it refuses, and changes nothing.
            self._send_extension(self._resend.pop(0), quota_add)
            return True
        (prompt,) = self._pool.draw(1)
        self._extensions.append(prompt.id)
        self._store.note_extended(self._id, self._extensions)
        if self._send_extension(prompt, quota_add):
            return True
        self._extensions.pop()
        self._store.note_extended(self._id, self._extensions)
        self._pool.undo_draw(prompt)
        return False

    def _send_extension(self, prompt: TrainingPrompt, quota_add: int) -> bool:
        """Send the prompt; False if the round has ended. If only the prompt's engine has ended it, another has it."""
        body = self._pool.body(prompt, self._samples_per_prompt)
        is_open = self._call_if_open(self._client.extend, quota_add=quota_add, prompts=[body])
        if isinstance(self._client, EnginePool) and prompt.id in self._client.moved:
            self._pool.engine_of[prompt.id] = self._client.moved[prompt.id]
        return is_open

    def _call_if_open(self, call: Callable[..., Any], **body: Any) -> bool:
        """Make a call about this round. False if the round has ended; the call then has no effect."""
        try:
            call(self._id, **body)
        except AprilError as error:
            if error.status == 409:
                return False
            raise
        return True

    # After the summary

    def _assemble_rollout(self, summary: RolloutSummary) -> ScoredRollout:
        rollout = ScoredRollout(summary)
        for delivered in summary.delivered:
            prompt_id, incarnation = delivered["id"], delivered["incarnation"]
            scored = _assemble_group(
                [self._streamed[prompt_id, incarnation, index] for index in delivered["indices"]], delivered
            )
            verdict = self._verdicts.get((prompt_id, incarnation))
            if verdict is not None:
                verdict.result()
            rollout.problems += [score.problem for score in scored.scores if score.problem]
            if delivered["accepted"] is False:
                rollout.rejected += 1
            elif self._whole_groups and scored.scored < min(MIN_SCORED, self._samples_per_prompt):
                rollout.unscored += 1
            else:
                rollout.groups.append(scored)
            if delivered["complete"]:
                self._pool.remove(prompt_id)
        return rollout


def _assemble_group(streamed: list[_StreamedSample], delivered: dict[str, Any]) -> ScoredGroup:
    """The samples that are delivered together; waits for their scores."""
    samples = [part.group.samples[part.position] for part in streamed]
    group = replace(streamed[0].group, samples=samples, complete=delivered["complete"], accepted=delivered["accepted"])
    return ScoredGroup(group, [part.scores.result()[part.position] for part in streamed])
