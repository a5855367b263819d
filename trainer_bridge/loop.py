"""The training loop: rollout → rewards → micro-batches → loss → optimiser step → push, with checkpoints and evaluation.

A lost engine is reconnected (or restarted) and gets the weights of the current step; a trainer that was killed resumes
from its last checkpoint. Rounds are repeated under the same id, so that no sample is lost or trained on twice.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from sglang_april.client import AprilError
from trainer_bridge.agent_rollout import AgentRollouts
from trainer_bridge.checkpoints import Checkpoints, LoopState
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData, read_rows
from trainer_bridge.engine_session import EngineSession
from trainer_bridge.evaluation import evaluation_round_id
from trainer_bridge.handover import Handover, PhaseTimes
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.megatron.workers import TrainerFailed
from trainer_bridge.metrics import TrainedStep, step_metrics
from trainer_bridge.progress import RunProgress
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rewards import RewardError, Rewards
from trainer_bridge.rollout import RolloutDriver, RolloutSource
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.rollout_engine import RolloutEngines
from trainer_bridge.samples import (
    TrainingSample,
    fill_proximal,
    pack_micro_batches,
    sequences_by_response,
    split_updates,
    training_samples,
)
from trainer_bridge.trainer import Trainer
from trainer_bridge.validate import (
    MAX_ROUNDS_PER_STEP,
    RunError,
    check,
    check_model,
    check_on_policy,
    modified_sampling,
)

if TYPE_CHECKING:
    from trainer_bridge.ray_cluster import RayCluster

T = TypeVar("T")


class TrainingLoop:
    """One run, from its first step or its last checkpoint to its end. `close` releases everything that it started."""

    def __init__(self, config: Config, trainer: Trainer | None = None, progress: RunProgress | None = None) -> None:
        check(config)
        if trainer is None:
            check_model(config)
        # Ray's actors have other working folders than this process.
        save, model = Path(config.save).absolute(), Path(config.hf_checkpoint).absolute()
        self.config = config = structs.replace(config, save=str(save), hf_checkpoint=str(model))
        folder = Path(config.save)
        self.store = Checkpoints(folder, config.keep_checkpoints)
        self.run_name = self.store.run_name(config.run)
        self.progress = progress or RunProgress(folder)
        self._data = PromptData(read_rows(config.prompt_data), config)
        self._eval_data: PromptData | None = None
        if config.eval_interval is not None and config.eval_prompt_data is not None:
            self._eval_data = PromptData(read_rows(config.eval_prompt_data), config, shuffle=False)
        rewards = None if config.agent else _start_rewards(config)
        self._cluster = _connect_cluster(config)
        self.engines = RolloutEngines(config, folder, self._cluster, self.progress.note)
        self.pool = PromptPool(self._data, len(config.servers) or config.engines)
        self.rollouts = self._rollouts(rewards)
        self.trainer = trainer or make_trainer(config.trainer, self._cluster)
        self.session = EngineSession(self.engines, self.trainer, self.rollouts, self.store, self.run_name, config)
        self.state = LoopState()
        self._unacknowledged: list[str] = []
        self._times = PhaseTimes()
        self._handover = Handover(config, self.engines, self.trainer, self._times, self._with_engines)

    def close(self) -> None:
        """Stop trainer, reward processes and servers of the run. The run can be resumed from its checkpoints."""
        self.rollouts.close()
        self.trainer.close()
        self.engines.close()
        self.progress.close()
        if self._cluster is not None:
            self._cluster.close()

    def interrupt(self) -> None:
        """Stop at once what would keep this process from ending; `close` need not follow."""
        self.rollouts.interrupt()

    def _rollouts(self, rewards: Rewards | None) -> RolloutSource:
        config, client = self.config, self.engines.client
        if rewards is not None:
            return RolloutDriver(client, self.run_name, self.pool, rewards, config, self.store)
        (engine,) = self.engines.each
        return AgentRollouts(
            engine.client, engine.url, self.run_name, self.pool, config, self.store, self.progress.warn
        )

    def run(self) -> LoopState:
        """Run all remaining steps and the end of the run."""
        for _ in self.steps():
            pass
        return self.state

    def steps(self) -> Iterator[int]:
        """As `run`, step by step: yields the number of each step when it is completed, except of the drain."""
        self._restore()
        self._evaluate()
        while self.state.step < self.config.num_rollout:
            self._step(self.config.rollout_batch_size)
            yield self.state.step
        if self.state.step == self.config.num_rollout:
            self._end()

    # One step

    def _step(self, quota: int | None) -> None:
        started, number = time.monotonic(), self.state.step + 1
        rounds = self._rounds(f"{self.run_name}.{number}", quota)
        rate_known, self.session.reconnected = not self.session.reconnected, False
        version = self._trained_version(rounds)
        samples = training_samples([group for rollout in rounds for group in rollout.groups], self.config)
        self._handover.to_trainer()
        trained = self._train(samples, version)
        self.state.step = self.session.step = number
        self.state.position = self._data.position
        self.state.pending = list(self.pool.prompts)
        self.state.pending_engines = [self.pool.engine_of[prompt_id] for prompt_id in self.state.pending]
        self.state.samples += len(sequences_by_response(samples))
        self._handover.to_engines(self.session.sync_weights)
        self.state.seconds += time.monotonic() - started
        row = step_metrics(self.state, version, rounds, samples, trained, rate_known=rate_known)
        # The row is written before the checkpoint, which completes the step; so the next row has the time of saving.
        self.progress.step(row | {"drain": quota is None, "seconds": self._times.take()})
        self._save(rounds)
        self._evaluate()

    def _rounds(self, round_id: str, quota: int | None) -> list[ScoredRollout]:
        """The round of this step, and further ones for groups that could not be replaced before it ended.

        A resumed run repeats all of them, even if every reward of the first one succeeds now: the engine has their
        prompts.
        """
        rounds = [self._with_engines(lambda: self.rollouts.round(round_id, quota, fill=quota is not None))]
        noted = self.store.further_rounds(round_id)
        while quota is not None and self.config.quota_unit == "group":
            missing = quota - sum(len(rollout.groups) for rollout in rounds)
            if len(rounds) <= len(noted):
                missing = noted[len(rounds) - 1]
            if missing <= 0:
                break
            if len(rounds) == MAX_ROUNDS_PER_STEP:
                problems = "; ".join(rounds[-1].problems[:3])
                raise RunError(f"{missing} groups short after {len(rounds)} rounds: none can be trained on. {problems}")
            if len(rounds) > len(noted):
                noted.append(missing)
                self.store.note_further_rounds(round_id, noted)
            rounds.append(self._with_engines(partial(self.rollouts.round, f"{round_id}-{len(rounds)}", missing)))
        for rollout in rounds:
            self._times.add("rollout", rollout.generate_s)
            self._times.add("reward_wait", rollout.reward_wait_s)
        return rounds

    def _trained_version(self, rounds: list[ScoredRollout]) -> int:
        """The policy version of the trainer's weights, which must be the engine's at the end of the round."""
        version, engine_version = self.session.version, rounds[-1].summary.policy_version
        if engine_version != version:
            raise RunError(
                f"the engine is at policy version {engine_version}, the trainer at {version}: "
                "is another trainer pushing to this engine?"
            )
        return version

    def _train(self, samples: list[TrainingSample], version: int) -> list[TrainedStep]:
        """The optimiser steps of a round."""
        config = self.config
        # A round may deliver more than its quota.
        updates = split_updates(samples, None if config.strict_on_policy else config.global_batch_size)
        with self._times.timed("proximal"):
            if config.loss.proximal in ("trainer", "engine"):
                fill_proximal([sample for update in updates for sample in update], version, config, self.trainer)
        trained: list[TrainedStep] = []
        with self._times.timed("train"):
            for update in updates:
                packed = pack_micro_batches(update, version, config)
                report = self.trainer.step([micro_batch.batch for micro_batch in packed], config.loss)
                trained.append(TrainedStep(update, packed, report))
        if config.strict_on_policy:
            exact = config.train_dtype == "float32" and not modified_sampling(config)
            check_on_policy([step.report.stats.row() for step in trained], exact=exact)
        return trained

    def _restore(self) -> None:
        """Load the last checkpoint, connect to the engines, and push its weights if necessary."""
        checkpoint = self.store.newest()
        if checkpoint is not None:
            self.state, folder = checkpoint
            self.trainer.load(folder)
            self._data.position = self.state.position
            self.pool.restore(self.state.pending, self.state.pending_engines)
        self.progress.resume(self.state.step)
        self.session.step = self.state.step
        self.session.call(self.session.sync_weights, self.progress.warn, reconnect_first=True)
        self._unacknowledged = list(self.state.acknowledged)
        if self.state.step in self.progress.evaluated_steps:
            self._unacknowledged.append(evaluation_round_id(self.run_name, self.state.step))
        self._acknowledge()
        for name in modified_sampling(self.config):
            self.progress.warn(f"{name} changes the distribution that tokens are drawn from: ratios are approximate")

    # Checkpoints, evaluation, end of the run

    def _saves_after_step(self) -> bool:
        """Whether the current step is followed by a checkpoint."""
        return self.state.step % self.config.save_interval == 0 or self.state.step >= self.config.num_rollout

    def _save(self, rounds: list[ScoredRollout]) -> None:
        """Write a checkpoint if due, then acknowledge the rounds and evaluations that precede it."""
        self._unacknowledged += [rollout.summary.round_id for rollout in rounds]
        if not self._saves_after_step():
            return
        with self._times.timed("save"):
            self.state.acknowledged = list(self._unacknowledged)
            try:
                self.store.save(self.state, self.trainer.save)
            except TrainerFailed:
                raise
            except (OSError, RuntimeError) as error:  # PyTorch raises RuntimeError for a full disk
                reason = str(error).partition("\n")[0]
                raise RunError(f"{self.store.path(self.state.step)} cannot be written: {reason}") from error
            self._acknowledge()

    def _acknowledge(self) -> None:
        def acknowledge_first() -> None:
            try:
                self.engines.client.ack(self._unacknowledged[0])
            except AprilError as error:
                if error.status not in (404, 410):  # a new engine, or a reply that is no longer kept: both are fine
                    raise

        while self._unacknowledged:
            self._with_engines(acknowledge_first)
            self._unacknowledged.pop(0)

    def _evaluate(self) -> None:
        """Evaluate the weights of this step if that is due and not done yet."""
        data, step, interval = self._eval_data, self.state.step, self.config.eval_interval
        if data is None or interval is None or step in self.progress.evaluated_steps:
            return
        if step % interval and step != self.config.num_rollout:
            return
        metrics = self._with_engines(lambda: self.rollouts.evaluate(step, data))
        self.progress.evaluated(self.state, metrics)
        self._unacknowledged.append(evaluation_round_id(self.run_name, step))
        if self._saves_after_step():
            self._acknowledge()

    def _end(self) -> None:
        """Finish and train on all partials in one more step (`on_end: drain`), or drop them."""
        if self.config.on_end == "drop":
            self._with_engines(self.rollouts.drop)
            return
        self._with_engines(self.rollouts.drop_unstarted)
        if len(self.pool):
            self._step(None)

    def _with_engines(self, call: Callable[[], T]) -> T:
        return self.session.call(call, self.progress.warn)


def _start_rewards(config: Config) -> Rewards:
    path, per_group = config.group_reward or config.reward, config.group_reward is not None
    try:
        return Rewards(path, config.reward_workers, config.reward_timeout, per_group=per_group)
    except RewardError as error:
        raise ConfigError(f"{'group_reward' if per_group else 'reward'}: {error}") from error


def _connect_cluster(config: Config) -> "RayCluster | None":
    if not config.ray:
        return None
    from trainer_bridge.ray_cluster import RayCluster

    return RayCluster(config.ray_address)
