"""Rounds of agents against a fake engine: which are started, repeated, replaced, ended and carried."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from sglang_april.client import AprilError, RecordedTrajectory, RolloutReply, ServerLostError
from trainer_bridge import agent_rollout
from trainer_bridge.agent_rollout import AgentRollouts
from trainer_bridge.agents import AgentFinished, StartAgent
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.validate import RunError

Outcome = Callable[[StartAgent], float | str | None]
"""The reward of a trajectory, why it has none, or None: it does not end."""


class FakeRunner:
    """Ends each trajectory at once, with the result of `outcome`."""

    outcome: Outcome

    def __init__(self, *arguments: Any) -> None:
        self.finished = arguments[-1]
        self.started: list[StartAgent] = []
        self.cancelled: list[str] = []

    def start(self, run: str, start: StartAgent) -> None:
        assert start.headers["x-april-run"] == run
        self.started.append(start)
        outcome = type(self).outcome(start)
        if isinstance(outcome, str):
            self.finished(AgentFinished(start.id, None, outcome))
        elif outcome is not None:
            self.finished(AgentFinished(start.id, outcome))

    def cancel(self, ids: Any) -> list[str]:
        self.cancelled += (names := list(ids))
        return names

    def clock(self, run: str) -> Any:
        return nullcontext()

    def close(self) -> None:
        pass


class FakeAgentEngine:
    """Counts groups whose `n` trajectories are done, and delivers them in that order."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.done_: dict[str, dict[str, Any]] = {}
        self.rejected: list[str] = []
        self.dropped: list[str] = []
        self.unknown: set[str] = set()
        """Trajectories that made no request."""
        self.lost = False
        self.open: dict[str, Any] | None = None
        self.answered: dict[str, RolloutReply] = {}
        self.stopped = False
        self._changed = threading.Condition()

    def rollout(self, **body: Any) -> RolloutReply:
        with self._changed:
            self.bodies.append(body)
            self.open, self.stopped = body, False
            self._changed.wait_for(lambda: self.lost or self.stopped or self._is_met(body), 60)
            self.open = None
            if self.lost:
                raise ServerLostError(0, "server", "lost")
            units = self._units(body)
            taken = [name for unit in units[: body["quota"] or len(units)] for name in unit]
            records = [
                RecordedTrajectory(
                    name, body["run"], "", self.done_[name]["reward"], self.done_[name]["metadata"], [], []
                )
                for name in taken
            ]
            for name in taken:
                del self.done_[name]
            carried = [{"group": name, "id": name, "tokens": 5, "state": "done"} for name in self.done_]
            return RolloutReply(body["round_id"], body["run"], 1, "quota", {"trajectories": carried}, {}, [], records)

    def _units(self, body: dict[str, Any]) -> list[list[str]]:
        if body["quota_unit"] == "trajectory":
            return [[name] for name in self.done_]
        prompts = Counter(end["metadata"]["prompt"] for end in self.done_.values())
        return [
            [name for name, end in self.done_.items() if end["metadata"]["prompt"] == prompt]
            for prompt, count in prompts.items()
            if count == body["n"]
        ]

    def _is_met(self, body: dict[str, Any]) -> bool:
        return body["quota"] is not None and len(self._units(body)) >= body["quota"]

    @contextmanager
    def change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def done(self, run: str, trajectories: dict[str, Any] | None = None, reject: list[str] | None = None) -> None:
        with self.change():
            if self.lost:
                raise ServerLostError(0, "server", "lost")
            if self.unknown & {*(trajectories or {}), *(reject or [])}:
                raise AprilError(404, "trajectories", "unknown")
            self.done_ |= trajectories or {}
            self.rejected += reject or []

    def trajectory(self, name: str, run: str) -> None:
        if name in self.unknown:
            raise AprilError(404, "id", "unknown")

    def state(self) -> dict[str, Any]:
        return {"rounds": [] if self.open is None else [self.open]}

    def get_round(self, round_id: str) -> RolloutReply:
        if round_id not in self.answered:
            raise AprilError(404, "round_id", "unknown")
        return self.answered[round_id]

    def stop(self, round_id: str) -> None:
        with self.change():
            self.stopped = True

    def drop(self, run: str) -> None:
        with self.change():
            self.dropped.append(run)
            self.done_.clear()


@pytest.fixture
def engine() -> FakeAgentEngine:
    return FakeAgentEngine()


@pytest.fixture
def make(engine: FakeAgentEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(agent_rollout, "AgentRunner", FakeRunner)
    made: list[AgentRollouts] = []

    def rollouts(outcome: Outcome, **fields: Any) -> AgentRollouts:
        FakeRunner.outcome = staticmethod(outcome)  # type: ignore[assignment]
        base = {"hf_checkpoint": "m", "prompt_data": "d", "agent": "m:f", "rollout_batch_size": 2}
        config = Config.from_fields({**base, "n_samples_per_prompt": 2, "over_sampling_batch_size": 3, **fields})
        data = PromptData([{"input": f"q{i}", "label": None} for i in range(64)], config)
        store = Checkpoints(tmp_path, 1)
        made.append(AgentRollouts(engine, "http://e", "r", PromptPool(data), config, store, warnings.append))  # type: ignore[arg-type]
        return made[-1]

    warnings: list[str] = []
    rollouts.warnings = warnings  # type: ignore[attr-defined]
    yield rollouts
    for each in made:
        each.close()


def runner(rollouts: AgentRollouts) -> FakeRunner:
    return rollouts._runner  # type: ignore[return-value]


def delivered(rollout: ScoredRollout) -> list[tuple[str, list[float | None]]]:
    return [(group.prompt_id, [t.reward for t in group.trajectories]) for group in rollout.groups]  # type: ignore[attr-defined]


def started(rollouts: AgentRollouts) -> list[str]:
    return [start.task.id for start in runner(rollouts).started]


def test_groups_are_ended_together_and_carried_ones_are_not_started_again(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    rollouts = make(lambda start: float(start.task.index))
    first = rollouts.round("r.1", 2)
    assert delivered(first) == [("e0-0", [0.0, 1.0]), ("e0-1", [0.0, 1.0])]
    assert list(rollouts.pool.prompts) == ["e0-2"]
    second = rollouts.round("r.2", 2)
    assert delivered(second)[0] == ("e0-2", [0.0, 1.0])
    assert started(rollouts) == [f"e0-{i}.{j}" for i in range(5) for j in range(2)]
    assert engine.dropped == ["r"], "only before the first round"
    assert engine.bodies[0]["trajectories"]
    assert (engine.bodies[0]["n"], engine.bodies[0]["quota"], "prompts" in engine.bodies[0]) == (2, 2, False)
    groups = {start.headers["x-april-group"] for start in runner(rollouts).started}
    assert len(groups) == 5


def test_the_seed_of_a_trajectory_is_the_same_in_every_attempt_and_run(make: Callable[..., Any]) -> None:
    rollouts = make(lambda start: "broken" if start.task.id == "e0-0.0" and start.id.endswith("0") else 1.0)
    rollouts.round("r.1", 2)
    again = make(lambda start: 1.0)
    again.round("r.1", 2)
    seeds = {start.task.id: start.task.sampling["seed"] for start in runner(again).started}
    assert all(start.task.sampling["seed"] == seeds[start.task.id] for start in runner(rollouts).started)
    assert len(set(seeds.values())) == len(seeds)


def test_a_failed_trajectory_is_rejected_logged_and_repeated(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    failed: list[str] = []

    def outcome(start: StartAgent) -> float | str:
        if start.task.id == "e0-0.1" and not failed:
            failed.append(start.id)
            return "KeyError('no such tool')"
        return 1.0

    rollouts = make(outcome)
    rollout = rollouts.round("r.1", 2)
    assert delivered(rollout)[0][0] in ("e0-0", "e0-1")
    assert engine.rejected == failed
    assert make.warnings == [f"trajectory {failed[0]} is rejected, and repeated: KeyError('no such tool')"]  # type: ignore[attr-defined]
    assert rollout.problems == make.warnings  # type: ignore[attr-defined]
    assert Counter(started(rollouts))["e0-0.1"] == 2


def test_a_group_whose_agent_fails_twice_is_given_up_and_replaced(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    rollouts = make(lambda start: "broken" if start.task.id == "e0-1.0" else 1.0)
    rollout = rollouts.round("r.1", 3)
    assert [prompt for prompt, _ in delivered(rollout)] == ["e0-0", "e0-2", "e0-3"]
    assert (rollout.unscored, rollout.replaced) == (1, 1)
    assert "e0-1" not in rollouts.pool.prompts
    assert not any(name.startswith("e0-1.") for name in engine.done_)


def test_with_dynamic_sampling_groups_of_equal_rewards_are_rejected(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    rollouts = make(
        lambda start: 1.0 if start.task.id.startswith("e0-0.") else float(start.task.index), dynamic_sampling=True
    )
    rollout = rollouts.round("r.1", 3)
    assert [prompt for prompt, _ in delivered(rollout)] == ["e0-1", "e0-2", "e0-3"]
    assert (rollout.rejected, rollout.unscored, rollout.replaced) == (1, 0, 1)
    assert len([name for name in engine.rejected if name.startswith("e0-0.")]) == 2


def test_an_agent_that_always_fails_ends_the_run(make: Callable[..., Any]) -> None:
    with pytest.raises(RunError, match=r"32 trajectories in a row failed, the last one: broken"):
        make(lambda start: "broken").round("r.1", 2)


def test_an_agent_that_makes_no_request_has_failed(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    def outcome(start: StartAgent) -> float:
        if start.task.id == "e0-0.0" and start.id.endswith("0"):
            engine.unknown.add(start.id)
        return 1.0

    rollouts = make(outcome)
    assert [prompt for prompt, _ in delivered(rollouts.round("r.1", 2))] == ["e0-1", "e0-2"]
    assert "made no request" in make.warnings[0]  # type: ignore[attr-defined]
    assert delivered(rollouts.round("r.2", 1)) == [("e0-0", [1.0, 1.0])]


def test_after_the_engine_was_lost_all_agents_of_the_pool_start_anew(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    hangs = True
    rollouts = make(lambda start: None if hangs else 1.0)

    def lose() -> None:
        while len(runner(rollouts).started) < 6:
            pass
        with engine.change():
            engine.lost = True

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(ServerLostError):
        rollouts.round("r.1", 2)
    thread.join()
    before = [start.id for start in runner(rollouts).started]
    assert sorted(runner(rollouts).cancelled) == sorted(before)
    assert not rollouts.pool.prompts
    engine.lost = hangs = False
    rollout = rollouts.round("r.1", 2)
    assert [prompt for prompt, _ in delivered(rollout)] == ["e0-0", "e0-1"]
    assert not set(before) & {start.id for start in runner(rollouts).started[6:]}
    assert engine.bodies[0] == engine.bodies[1]
    assert engine.dropped == ["r", "r"]


def test_a_round_that_was_answered_before_a_restart_starts_no_agent(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    record = RecordedTrajectory("x", "r", "g", 1.0, {"prompt": "e0-1", "index": 0}, [], [])
    engine.answered["r.1"] = RolloutReply("r.1", "r", 1, "quota", {"trajectories": []}, {}, [], [record])
    rollouts = make(lambda start: 1.0)
    assert delivered(rollouts.round("r.1", 2)) == [("e0-1", [1.0])]
    assert started(rollouts) == []
    rollouts.round("r.2", 2)
    assert set(started(rollouts)) == {f"e0-{i}.{j}" for i in (0, 2, 3) for j in range(2)}


def test_single_trajectories_are_a_quota_too(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    rollouts = make(lambda start: 1.0, quota_unit="sample", advantage_estimator="reinforce", over_sampling_batch_size=2)
    assert delivered(rollouts.round("r.1", 3)) == [("e0-0", [1.0, 1.0]), ("e0-1", [1.0])]
    assert list(rollouts.pool.prompts) == ["e0-1"]
    assert "n" not in engine.bodies[0]


def test_the_drain_ends_when_all_agents_have_finished(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    rollouts = make(lambda start: None if start.task.id.startswith("e0-2.") else 1.0)
    rollouts.round("r.1", 2)
    rollouts._carried = []
    rollouts.drop_unstarted()
    assert not rollouts.pool.prompts
    assert sorted(name.rpartition(".")[0] for name in engine.rejected) == ["e0-2.0", "e0-2.1"]


def test_an_evaluation_counts_failed_trajectories(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    fields = {"eval_prompt_data": "d", "n_samples_per_eval_prompt": 2, "eval_temperature": 0.5}
    rollouts = make(lambda start: "broken" if start.task.id == "e0-1.0" else float(start.task.index), **fields)
    config = rollouts._config
    metrics = rollouts.evaluate(3, PromptData([{"input": "a", "label": 0}, {"input": "b", "label": 0}], config))
    assert (metrics["reward"], metrics["prompts"], metrics["unscored"]) == (0.75, 2, 1)
    body = engine.bodies[0]
    assert (body["run"], body["round_id"], body["quota"]) == ("r/eval", "r.eval-3", None)
    assert runner(rollouts).started[0].task.sampling["temperature"] == 0.5
