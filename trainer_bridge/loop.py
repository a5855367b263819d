"""The loop of a run: rollout → rewards → batches → loss → step → push → next round, checkpoints and evaluation.

Steps 1 to 6 happen in the engine (`rollout.py`), step 7 in the trainer (`samples.py`, `losses.py`), step 8 is the push,
step 9 the next round. A lost server is waited for (or started again) and given this step's weights; a lost trainer goes
on from its last checkpoint. Rounds are asked for by id, so that neither loses nor repeats a sample.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from sglang_april.client import AprilError
from trainer_bridge.checkpoints import Checkpoints, LoopState
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData, read_rows
from trainer_bridge.engine_session import EngineSession
from trainer_bridge.evaluation import evaluate, round_of
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.megatron.workers import TrainerFailed
from trainer_bridge.metrics import step_row
from trainer_bridge.progress import RunProgress
from trainer_bridge.rewards import RewardError, Rewards
from trainer_bridge.rollout import RolloutDriver, ScoredRollout
from trainer_bridge.rollout_engine import RolloutEngines
from trainer_bridge.samples import PackedMicroBatch, TrainingSample, known_proximal, micro_batches, responses, updates
from trainer_bridge.trainer import PARTS, Part, StepReport, Trainer
from trainer_bridge.validate import RunError, check, check_model, check_on_policy, modified_sampling

if TYPE_CHECKING:
    from trainer_bridge.ray_cluster import RayCluster

MOST_ROUNDS = 10
"""A step that needs more than this has a reward that always fails, or never differs."""
T = TypeVar("T")


class TrainingLoop:
    """One run, from its last checkpoint or its first step to its end. `close` ends what it started."""

    def __init__(self, config: Config, trainer: Trainer | None = None, progress: RunProgress | None = None) -> None:
        check(config)
        if trainer is None:
            check_model(config)
        self.config = config
        folder = Path(config.save)
        self.store = Checkpoints(folder, config.keep_checkpoints)
        self.run_name = self.store.run_name(config.run)
        self.progress = progress or RunProgress(folder)
        self._data = PromptData(read_rows(config.prompt_data), config)
        self._eval_data: PromptData | None = None
        if config.eval_interval is not None and config.eval_prompt_data is not None:
            self._eval_data = PromptData(read_rows(config.eval_prompt_data), config, shuffle=False)
        self.rewards = _rewards(config)
        self._cluster = _cluster(config)
        self.engine = RolloutEngines(config, folder, self._cluster)
        self.trainer = trainer or make_trainer(config.trainer, self._cluster)
        self.rollouts = RolloutDriver(self.engine.client, self.run_name, self._data, self.rewards, config, self.store)
        self.link = EngineSession(self.engine, self.trainer, self.rollouts, self.store, self.run_name, config)
        self.state = LoopState()
        self._unacknowledged: list[str] = []
        self._spent: dict[str, float] = {}

    def close(self) -> None:
        """End trainer, reward processes and a server of ours; the run can go on later from its checkpoints."""
        self.rewards.close()
        self.trainer.close()
        self.engine.close()
        self.progress.close()
        if self._cluster is not None:
            self._cluster.close()

    def run(self) -> LoopState:
        """All steps that are left, and the end."""
        self._restore()
        self._evaluate()
        while self.state.step < self.config.num_rollout:
            self._step(self.config.rollout_batch_size)
        if self.state.step == self.config.num_rollout:
            self._end()
        return self.state

    # One step

    def _step(self, quota: int | None) -> None:
        started, number = time.monotonic(), self.state.step + 1
        rounds = self._rounds(f"{self.run_name}.{number}", quota)
        version = self._trained_version(rounds)
        made = responses([group for rollout in rounds for group in rollout.groups], self.config)
        with self._part("colocate_release"):
            if self.config.colocate:
                self._with_engine(self.engine.release)
        with self._part("colocate_onload"):
            if self.config.offloads:
                self.trainer.onload(*PARTS)
        reports, cuts = self._train(made, version)
        self.state.step = self.link.step = number
        self.state.position = self._data.position
        self.state.pending = list(self.rollouts.pending)
        self.state.homes = [self.rollouts.homes[prompt_id] for prompt_id in self.state.pending]
        self.state.samples += len(made)
        self._push()
        self.state.seconds += time.monotonic() - started
        row = step_row(self.state, version, rounds, made, reports, cuts)
        # The row before the checkpoint, which would end the step without it; the time of saving is in the next row.
        self.progress.step(row | {"drain": quota is None, "seconds": self._spent})
        self._spent = {}
        self._save(rounds)
        self._evaluate()

    def _rounds(self, round_id: str, quota: int | None) -> list[ScoredRollout]:
        """The round of this step; and another for groups that could not be replaced before it ended."""
        done = [self._with_engine(lambda: self.rollouts.round(round_id, quota, full=quota is not None))]
        while quota is not None and self.config.quota_unit == "group":
            left = quota - sum(len(rollout.groups) for rollout in done)
            if left <= 0:
                break
            if len(done) == MOST_ROUNDS:
                problems = "; ".join(done[-1].problems[:3])
                raise RunError(f"{left} groups short after {len(done)} rounds: none fit to train on. {problems}")
            done.append(self._with_engine(partial(self.rollouts.round, f"{round_id}-{len(done)}", left)))
        for rollout in done:
            self._spend("rollout", rollout.generate_s)
            self._spend("reward_wait", rollout.reward_wait_s)
        return done

    def _trained_version(self, rounds: list[ScoredRollout]) -> int:
        """The policy version of the trainer's weights, which must be the one that the engine ended the round with."""
        version = self.link.version
        seen = rounds[-1].summary.policy_version
        if seen != version:
            raise RunError(f"the engine answers with policy version {seen}, the trainer is at {version}: who pushes?")
        return version

    def _train(
        self, made: list[TrainingSample], version: int
    ) -> tuple[list[StepReport], list[tuple[list[TrainingSample], PackedMicroBatch]]]:
        config = self.config
        parts = updates(made, config.global_batch_size)
        with self._part("proximal"):
            if config.proximal in ("trainer", "engine"):
                self._fill_proximal([response for part in parts for response in part], version)
        reports: list[StepReport] = []
        cuts: list[tuple[list[TrainingSample], PackedMicroBatch]] = []
        with self._part("train"):
            for part in parts:
                batches = micro_batches(part, version, config)
                reports.append(self.trainer.step([cut.batch for cut in batches], config.loss))
                cuts += [(part, cut) for cut in batches]
        if config.strict_on_policy:
            exact = config.train_dtype == "float32" and not modified_sampling(config)
            check_on_policy([report.stats.row() for report in reports], exact=exact)
        return reports, cuts

    def _fill_proximal(self, made: list[TrainingSample], version: int) -> None:
        """π_old of every response: from the engine where it knows it, else by a forward of the trainer."""
        unknown = []
        for response in made:
            if self.config.proximal == "engine":
                response.proximal = known_proximal(response, version)
            if self.config.proximal == "trainer" or np.isnan(response.proximal).any():
                unknown.append(response)
        cuts = micro_batches(unknown, version, self.config)
        for cut, logprobs in zip(cuts, self.trainer.logprobs([c.batch.sequences for c in cuts]), strict=True):
            flat, at = logprobs.numpy(), 0
            for response in (unknown[i] for i in cut.members):
                own = flat[at : at + len(response.output_ids)]
                at += len(own)
                if self.config.proximal == "engine":
                    own = np.where(np.isnan(response.proximal), own, response.proximal)
                response.proximal = own.astype(np.float32)

    # Engine and trainer agree

    def _push(self) -> None:
        """Step 8; colocated, the engine first takes its weights' memory back, and its KV pool after the push.

        The trainer makes room for each: for the weights its optimiser's memory, for the KV pool all that is left.
        """
        self._offload("optimizer")
        with self._part("colocate_weights"):
            if self.config.colocate:
                self._with_engine(lambda: self.engine.resume("weights"))
        with self._part("push"):
            self._with_engine(self.link.align)
        self._offload("weights")
        with self._part("colocate_kv"):
            if self.config.colocate:
                self._with_engine(lambda: self.engine.resume("kv_cache", "cuda_graph"))

    def _offload(self, part: Part) -> None:
        with self._part("colocate_offload"):
            if self.config.offloads:
                self.trainer.offload(part)

    def _restore(self) -> None:
        """The last checkpoint, and an engine that has its weights."""
        found = self.store.newest()
        if found is not None:
            self.state, folder = found
            self.trainer.load(folder)
            self._data.position = self.state.position
            self.rollouts.restore(self.state.pending, self.state.homes)
        self.progress.resume(self.state.step)
        self.link.step = self.state.step
        self.link.call(self.link.align, self.progress.warn, at_once=False)
        self._unacknowledged = list(self.state.acknowledged)
        if self.state.step in self.progress.evaluated_steps:
            self._unacknowledged.append(round_of(self.run_name, self.state.step))
        self._acknowledge()
        for name in modified_sampling(self.config):
            self.progress.warn(f"{name} changes the distribution that tokens are drawn from: ratios are approximate")

    # Around the steps

    def _saves(self) -> bool:
        """Whether a restart goes on after this step, and not before it."""
        return self.state.step % self.config.save_interval == 0 or self.state.step >= self.config.num_rollout

    def _save(self, rounds: list[ScoredRollout]) -> None:
        """A checkpoint when it is due; then its rounds are acknowledged, and the evaluations before it."""
        self._unacknowledged += [rollout.summary.round_id for rollout in rounds]
        if not self._saves():
            return
        with self._part("save"):
            self.state.acknowledged = list(self._unacknowledged)
            try:
                self.store.save(self.state, self.trainer.save)
            except TrainerFailed:
                raise
            except (OSError, RuntimeError) as error:  # PyTorch makes a RuntimeError of a full disk
                said = str(error).partition("\n")[0]
                raise RunError(f"{self.store.path(self.state.step)} cannot be written: {said}") from error
            self._acknowledge()

    def _acknowledge(self) -> None:
        while self._unacknowledged:
            try:
                self._with_engine(lambda: self.engine.client.ack(self._unacknowledged[0]))
            except AprilError as error:
                if error.status not in (404, 410):  # another engine by now, or no longer kept: both are well
                    raise
            self._unacknowledged.pop(0)

    def _evaluate(self) -> None:
        """The held-out prompts under this step's weights, where that is due and not done."""
        data, step, interval = self._eval_data, self.state.step, self.config.eval_interval
        if data is None or interval is None or step in self.progress.evaluated_steps:
            return
        if step % interval and step != self.config.num_rollout:
            return
        figures = self._with_engine(
            lambda: evaluate(self.engine.client, self.run_name, step, data, self.rewards, self.config)
        )
        self.progress.evaluated(self.state, figures)
        self._unacknowledged.append(round_of(self.run_name, step))
        if self._saves():
            self._acknowledge()

    def _end(self) -> None:
        """`drain`: what has begun is finished and learned from, in one more step; `drop`: it is deleted."""
        client, run = self.engine.client, self.run_name
        if self.config.on_end == "drop":
            self._with_engine(lambda: client.drop(run))
            return
        unstarted = [group["id"] for group in self._with_engine(lambda: client.partials(run))["unstarted"]]
        if unstarted:
            self._with_engine(lambda: client.drop(run, unstarted))
        for prompt_id in unstarted:
            self.rollouts.forget(prompt_id)
        if self.rollouts.pending:
            self._step(None)

    def _with_engine(self, call: Callable[[], T]) -> T:
        return self.link.call(call, self.progress.warn)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Count what happens inside to a part of the step's time."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._spend(name, time.monotonic() - started)

    def _spend(self, name: str, seconds: float) -> None:
        if name.startswith("colocate") and not self.config.colocate:
            return
        self._spent[name] = self._spent.get(name, 0.0) + seconds


def _rewards(config: Config) -> Rewards:
    place, of_groups = config.group_reward or config.reward, config.group_reward is not None
    try:
        return Rewards(place, config.reward_workers, config.reward_timeout, of_groups=of_groups)
    except RewardError as error:
        raise ConfigError(f"{'group_reward' if of_groups else 'reward'}: {error}") from error


def _cluster(config: Config) -> "RayCluster | None":
    if not config.ray:
        return None
    from trainer_bridge.ray_cluster import RayCluster

    return RayCluster(config.ray_address)
