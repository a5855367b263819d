"""The rounds of a run: fills the prompt pool, sends the rollout request, and collects the scored groups."""

from collections.abc import Set
from typing import Any, Protocol

from sglang_april.client import AprilClient
from sglang_april.client.engine_pool import EnginePool
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.evaluation import evaluate
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rewards import Rewards, TrainingPrompt
from trainer_bridge.rollout_collector import RolloutCollector, ScoredRollout
from trainer_bridge.sampling import rollout_params


class RolloutSource(Protocol):
    """Runs the rounds and evaluations of one run: single responses (`RolloutDriver`) or agents (`AgentRollouts`)."""

    engines_with_carry: set[int]
    """Indices of the engines that hold the run's carry; a new engine without a journal holds none."""

    def round(self, round_id: str, quota: int | None, *, fill: bool = True) -> ScoredRollout:
        """Run a round to its end. `fill`: first draw prompts until the pool is full. On failure the pool is unchanged.

        A repeated call with the same `round_id` returns the same samples and generates nothing (`idempotent-round`).
        """

    def evaluate(self, step: int, data: PromptData) -> dict[str, float]:
        """Mean reward over all held-out prompts, and lengths (`evaluation.py`)."""

    def drop(self) -> None:
        """Delete everything undelivered of the run at the engines."""

    def drop_unstarted(self) -> None:
        """Delete the prompts of which nothing is generated, so that a round without a quota finishes the others."""

    def interrupt(self) -> None:
        """Stop at once what would keep this process from ending."""

    def close(self) -> None:
        """Stop the processes."""


class RolloutDriver:
    """Runs the rounds of one run whose samples are single responses; a `RolloutSource`."""

    def __init__(
        self,
        client: AprilClient | EnginePool,
        run: str,
        pool: PromptPool,
        rewards: Rewards,
        config: Config,
        store: Checkpoints,
    ) -> None:
        self.client, self.pool, self.rewards = client, pool, rewards
        self._run, self._config, self._store = run, config, store
        self.engines_with_carry: set[int] = set()

    def round(self, round_id: str, quota: int | None, *, fill: bool = True) -> ScoredRollout:
        """As `RolloutSource.round`."""
        with self.pool.rollback_on_error():
            return self._round(round_id, quota, fill)

    def evaluate(self, step: int, data: PromptData) -> dict[str, float]:
        """As `RolloutSource.evaluate`."""
        return evaluate(self.client, self._run, step, data, self.rewards, self._config)

    def drop(self) -> None:
        """As `RolloutSource.drop`."""
        self.client.drop(self._run)

    def drop_unstarted(self) -> None:
        """As `RolloutSource.drop_unstarted`."""
        unstarted = [group["id"] for group in self.client.partials(self._run)["unstarted"]]
        if unstarted:
            self.client.drop(self._run, unstarted)
        for prompt_id in unstarted:
            self.pool.remove(prompt_id)

    def interrupt(self) -> None:
        """As `RolloutSource.interrupt`: there is nothing to stop."""

    def close(self) -> None:
        """As `RolloutSource.close`."""
        self.rewards.close()

    def _round(self, round_id: str, quota: int | None, fill: bool) -> ScoredRollout:
        pool, all_engines = self.pool, set(range(self.pool.engines))
        missing = max(0, self._config.pool_size - len(pool)) if fill else 0
        new = pool.reassign() | {prompt.id for prompt in pool.draw(missing)}
        unsent = new | self._resent(round_id, pool.prompts.keys() - new)
        sent = [prompt for prompt_id, prompt in pool.prompts.items() if prompt_id in unsent]
        # If an engine is new, it may not have the extensions of an interrupted round either; they are drawn anew.
        extensions = self._store.extended(round_id) if all_engines <= self.engines_with_carry else []
        resend = pool.draw(len(extensions))
        collector = RolloutCollector(
            self.client,
            pool,
            self.rewards,
            self._store,
            self._config,
            round_id,
            quota,
            resend,
        )
        rollout = collector.collect(self._request(round_id, sent, quota))
        self.engines_with_carry = all_engines
        return rollout

    def _resent(self, round_id: str, carried: Set[str]) -> set[str]:
        """Those of the carried prompts that the request sends again: their engine lacks them, or did at the first
        attempt at this round."""
        known = set(self._store.resent(round_id))
        lost = {prompt_id for prompt_id in carried if self.pool.engine_of[prompt_id] not in self.engines_with_carry}
        if not lost <= known:
            self._store.note_resent(round_id, sorted(known | lost))
        return (known | lost) & carried

    def _request(self, round_id: str, prompts: list[TrainingPrompt], quota: int | None) -> dict[str, Any]:
        """The request. It depends on checkpoint and configuration only, so that a repeated one is identical."""
        config = self._config
        return {
            "run": self._run,
            "round_id": round_id,
            "prompts": [self.pool.body(prompt, config.n_samples_per_prompt) for prompt in prompts],
            "sampling_params": rollout_params(config),
            "quota": quota,
            "quota_unit": config.quota_unit,
            "count": "accepted" if config.dynamic_sampling and quota is not None else "finished",
            "kv": config.kv,
            "max_staleness": config.staleness_bound,
            "after_quota": config.after_quota,
            "quota_mode": config.quota_mode,
            "cohort_rounds": config.cohort_rounds,
            "concurrency": config.rollout_concurrency,
            "proximal": config.loss.proximal == "engine",
            "keep_until_ack": True,
            "previews": True,
        }
