"""The rounds of a run whose samples are trajectories of an agent function (`agent: module:function`).

The main thread opens a round and waits for its reply. Meanwhile agents send their requests to the engine, and one
thread takes their results (`agent_trajectories.py`). When the quota is met the engine suspends the requests of all
others; their agents only wait longer, and continue in the next round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_april.client import AprilClient, AprilError, RolloutReply
from sglang_april.client.types import RecordedTrajectory
from trainer_bridge.agent_round import AgentRound, AgentRounds
from trainer_bridge.agent_runner import AgentError, AgentRunner
from trainer_bridge.agent_trajectories import AgentTrajectories
from trainer_bridge.agents import AgentFinished
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData
from trainer_bridge.evaluation import evaluation_metrics, evaluation_round_id
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rewards import Score, TrainingPrompt
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.sampling import agent_params
from trainer_bridge.validate import check_unusable


class AgentRollouts:
    """Runs the rounds and evaluations of one run with an agent function."""

    def __init__(
        self,
        client: AprilClient,
        url: str,
        run: str,
        pool: PromptPool,
        config: Config,
        store: Checkpoints,
        warn: Callable[[str], None],
    ) -> None:
        """Start the worker processes. Raises: ConfigError: the agent function cannot be imported."""
        assert config.agent is not None
        self.client, self.pool = client, pool
        self._run, self._config, self._store, self._warn = run, config, store, warn
        self.engines_with_carry: set[int] = set()
        """{0} if the engine has this run's trajectories, else empty."""
        self._rounds = AgentRounds(client)
        """Its thread handles `_training`, `_evaluation` and, while a round is open, changes the pool."""
        self._carried: list[dict[str, Any]] | None = None
        """Trajectories that the last round has left at the engine; None if this process has had no round."""
        self._delivered: dict[str, set[int]] = {}
        """Trajectories that rounds have delivered, by prompt of the pool."""
        self._training: AgentTrajectories | None = None
        """None until the first round, and after the engine was lost."""
        self._evaluation: AgentTrajectories | None = None
        self._gone: list[str] = []
        """Prompts whose groups were rejected between two rounds."""
        try:
            self._runner = AgentRunner(
                config.agent, config.agent_workers, config.agent_timeout, url, config.api_key, self._take
            )
        except AgentError as error:
            raise ConfigError(f"agent: {error}") from error

    # Called by the training loop

    def round(self, round_id: str, quota: int | None, *, fill: bool = True) -> ScoredRollout:
        """As `RolloutDriver.round`. Without a quota the round ends when all agents have finished."""
        with self.pool.rollback_on_error():
            try:
                return self._train(round_id, quota, fill)
            except Exception:
                self._abandon()
                raise

    def evaluate(self, step: int, data: PromptData) -> dict[str, float]:
        """As `evaluation.evaluate`: each agent of each held-out prompt once, in a round of the run `<run>/eval`."""
        config, run, round_id = self._config, f"{self._run}/eval", evaluation_round_id(self._run, step)
        data.position = 0
        prompts = data.take(len(data))
        reply = self._answer(round_id)
        if reply is None:
            self.client.drop(run)
            trajectories = self._evaluation = self._trajectories(
                run, config.n_samples_per_eval_prompt, agent_params(config, evaluation=True), whole_groups=False
            )
            body = {"run": run, "round_id": round_id, "quota_unit": "trajectory", "quota": None, "keep_until_ack": True}
            try:
                reply = self._open_and_wait(AgentRound(round_id, stops=True), body, trajectories, lambda: prompts)
            except Exception:
                self._abandon()
                raise
            self._evaluation = None
        rewards: dict[str, list[Score]] = {prompt.id: [] for prompt in prompts}
        for trajectory in reply.trajectories:
            rewards[trajectory.metadata["prompt"]].append(Score(trajectory.reward))
        for scores in rewards.values():
            scores += [Score(None, "failed")] * (config.n_samples_per_eval_prompt - len(scores))
        return evaluation_metrics(list(rewards.values()), [_drawn(trajectory) for trajectory in reply.trajectories])

    def drop(self) -> None:
        """Delete all undelivered trajectories of this run at the engine."""
        self._abandon()
        self.client.drop(self._run)

    def drop_unstarted(self) -> None:
        """As `RolloutSource.drop_unstarted`: those of which the model has drawn no token.

        Agents of an earlier process, or of an engine that was lost, start again if the last reply carried tokens, or if
        this process has none.
        """
        if self._carried is None:
            return
        begun, training = {_prompt_of(row["id"]) for row in self._carried if row["tokens"]}, self._training

        def drop() -> None:
            if training is None:
                unstarted = self.pool.prompts.keys() - begun
            else:
                unstarted = training.unstarted() - begun
                training.reject(unstarted)
                unstarted |= self.pool.prompts.keys() - training.prompts
            for prompt_id in unstarted:
                self.pool.remove(prompt_id)

        self._rounds.call(drop)

    def interrupt(self) -> None:
        """Kill the agents at once. The engine ends their requests."""
        self._runner.close()

    def close(self) -> None:
        """Stop the workers."""
        self._runner.close()
        self._rounds.close()

    # A round

    def _train(self, round_id: str, quota: int | None, fill: bool) -> ScoredRollout:
        config, pool = self._config, self.pool
        self._rounds.raise_error()
        if self._training is not None and not self.engines_with_carry:
            self._abandon()  # the engine was restarted without a journal while no agent had a request
        current = AgentRound(round_id, trains=quota is not None, stops=quota is None)
        self._rounds.call(lambda: self._fill_pool(current, fill=fill))
        started, reply = time.monotonic(), None
        if self._training is None:
            current.extensions += [prompt.id for prompt in pool.draw(len(self._store.extended(round_id)))]
            reply = self._answer(round_id)
        if reply is None:
            if self._training is None:
                self.client.drop(self._run)  # left by an earlier process, whose agents have ended
                self._training = self._trajectories(
                    self._run, config.n_samples_per_prompt, agent_params(config), config.quota_unit == "group"
                )
            training = self._training

            def new() -> list[TrainingPrompt]:
                self._fill_pool(current, fill=fill)  # a result that has come since may have removed a prompt
                return [prompt for prompt_id, prompt in pool.prompts.items() if prompt_id not in training.prompts]

            reply = self._open_and_wait(current, self._request(round_id, quota), training, new)
        self._rounds.call(lambda: self._forget(reply.trajectories))
        self._carried = reply.carried["trajectories"]
        rollout = current.scored(reply)
        rollout.generate_s = time.monotonic() - started
        self.engines_with_carry = {0}
        return rollout

    def _open_and_wait(
        self,
        current: AgentRound,
        body: dict[str, Any],
        trajectories: AgentTrajectories,
        new: Callable[[], Sequence[TrainingPrompt]],
    ) -> RolloutReply:
        """Open a round, start the agents of new prompts, and wait for the reply.

        `new` is called on the thread of the results, like all that changes `trajectories`.
        """

        def begin() -> None:
            for prompt in new():
                trajectories.start(prompt)
            self._stop_if_finished()

        return self._rounds.run(current, body, begin, self._runner.clock(trajectories.run))

    def _request(self, round_id: str, quota: int | None) -> dict[str, Any]:
        """The request. It depends on checkpoint and configuration only, so that a repeated one is identical."""
        config = self._config
        groups = {"quota_unit": "group", "trajectories": True, "n": config.n_samples_per_prompt}
        return {
            "run": self._run,
            "round_id": round_id,
            "quota": quota,
            **(groups if config.quota_unit == "group" else {"quota_unit": "trajectory"}),
            "kv": config.kv,
            "max_staleness": config.staleness_bound,
            "after_quota": config.after_quota,
            "concurrency": config.rollout_concurrency,
            "keep_until_ack": True,
        }

    def _answer(self, round_id: str) -> RolloutReply | None:
        """The reply of a round that the engine has already answered, to an earlier process."""
        try:
            return self.client.get_round(round_id)
        except AprilError as error:
            if error.status not in (404, 410):
                raise
            return None

    # Results of agents, on their thread

    def _fill_pool(self, current: AgentRound, *, fill: bool) -> None:
        """Remove the prompts whose groups were rejected between two rounds; `fill`: draw what is missing.

        A checkpoint may have these prompts, so those that replace them are noted as in a round.
        """
        gone, self._gone = self._gone, []
        for prompt_id in gone:
            self.pool.remove(prompt_id)
        drawn = self.pool.draw(max(0, self._config.pool_size - len(self.pool)) if fill else 0)
        if replacing := drawn[len(drawn) - min(len(gone), len(drawn)) :]:
            current.extensions += [prompt.id for prompt in replacing]
            self._store.note_extended(current.id, current.extensions)

    def _forget(self, delivered: Sequence[RecordedTrajectory]) -> None:
        """Forget trajectories that the engine has delivered, and prompts of which it has delivered the last one."""
        for trajectory in delivered:
            prompt_id, index = trajectory.metadata["prompt"], trajectory.metadata["index"]
            indices = self._delivered.setdefault(prompt_id, set())
            indices.add(index)
            if self._training is not None:
                is_last = self._training.delivered(prompt_id, index)
            else:  # the round was answered before this process began, or before the engine was lost
                is_last = len(indices) == self._config.n_samples_per_prompt
            if is_last:
                self.pool.remove(prompt_id)
                del self._delivered[prompt_id]

    def _trajectories(self, run: str, n: int, sampling: Mapping[str, Any], whole_groups: bool) -> AgentTrajectories:
        return AgentTrajectories(
            self.client,
            self._runner,
            run,
            n,
            sampling,
            whole_groups=whole_groups,
            accept=self._accepts,
            replace=self._replace if run == self._run else lambda *_: None,
            warn=self._failed,
        )

    def _take(self, finished: AgentFinished) -> None:
        """Called by the runner, on any thread."""
        self._rounds.handle(lambda: self._handle(finished))

    def _handle(self, finished: AgentFinished) -> None:
        for trajectories in (self._training, self._evaluation):
            if trajectories is not None and trajectories.finished(finished):
                break
        self._stop_if_finished()

    def _stop_if_finished(self) -> None:
        trajectories = self._training if self._evaluation is None else self._evaluation
        current = self._rounds.current
        if current.stops and trajectories is not None and trajectories.all_finished:
            current.stops = False
            self.client.stop(current.id)

    def _accepts(self, rewards: list[float]) -> bool:
        return not self._config.dynamic_sampling or max(rewards) > min(rewards)

    def _failed(self, problem: str) -> None:
        self._rounds.current.problems.append(problem)
        self._warn(problem)

    def _replace(self, prompt: TrainingPrompt, reason: str) -> None:
        """Replace a group that was rejected, if a round of it is open; else the next one draws what is missing."""
        current, training = self._rounds.current, self._training
        assert training is not None
        current.given_up += bool(reason)
        current.rejected += not reason
        if not current.id or self._evaluation is not None:
            self._gone.append(prompt.id)
            return
        self.pool.remove(prompt.id)
        if current.trains:
            check_unusable(current.given_up + current.rejected, self._config, reason or "all its rewards are equal")
            (new,) = self.pool.draw(1)
            current.extensions.append(new.id)
            self._store.note_extended(current.id, current.extensions)
            training.start(new)

    def _abandon(self) -> None:
        """Cancel all agents, and forget them."""

        def forget() -> None:
            for trajectories in (self._training, self._evaluation):
                if trajectories is not None:
                    trajectories.cancel()
            self._training = self._evaluation = None
            self._gone = []  # their prompts start again with the others
            self._rounds.current = AgentRound("")

        self._rounds.call(forget)


def _prompt_of(name: str) -> str:
    """The prompt id in the name of a trajectory (`AgentTrajectories`)."""
    return name.partition(".")[0]


def _drawn(trajectory: RecordedTrajectory) -> int:
    return sum(len(leg.output_ids) for leg in trajectory.legs)
