"""Rounds of agents against a fake engine: which are started, repeated, replaced, ended and carried."""

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_april.client import RecordedTrajectory, RolloutReply, ServerLostError
from tests.bridge.fake_agents import FakeAgentEngine, FakeRunner, Outcome
from trainer_bridge import agent_rollout
from trainer_bridge.agent_rollout import AgentRollouts
from trainer_bridge.agent_runner import AgentError
from trainer_bridge.agents import AgentFinished, StartAgent
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.data import PromptData
from trainer_bridge.prompt_pool import PromptPool
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.validate import RunError


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


@pytest.mark.parametrize(
    ("outcomes", "dynamic", "message"),
    [((1.0, 1.0), True, "all its rewards are equal"), ((1.0, "broken"), False, "broken")],
)
def test_groups_that_can_never_be_trained_on_end_the_run(
    make: Callable[..., Any], outcomes: tuple[float | str, ...], dynamic: bool, message: str
) -> None:
    """After ten times the quota of 2, although not all trajectories fail."""

    def outcome(start: StartAgent) -> float | str:
        row = int(start.task.id.partition(".")[0].removeprefix("e0-"))
        return outcomes[start.task.index] if row < 40 else float(start.task.index)

    with pytest.raises(RunError, match=f"^21 groups of one round cannot be trained on. The last one: .*{message}"):
        make(outcome, dynamic_sampling=dynamic).round("r.1", 2)


def test_an_agent_that_makes_no_request_has_failed(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    def outcome(start: StartAgent) -> float:
        if start.task.id == "e0-0.0" and start.id.endswith("0"):
            engine.unknown.add(start.id)
        return 1.0

    rollouts = make(outcome)
    assert [prompt for prompt, _ in delivered(rollouts.round("r.1", 2))] == ["e0-1", "e0-2"]
    assert "made no request" in make.warnings[0]  # type: ignore[attr-defined]
    assert delivered(rollouts.round("r.2", 1)) == [("e0-0", [1.0, 1.0])]


def test_an_agent_that_fails_on_an_engine_without_the_run_is_repeated(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    """The engine was restarted without a journal, and has nothing to delete."""

    def outcome(start: StartAgent) -> float | str:
        if start.task.id == "e0-0.0" and start.id.endswith("0"):
            engine.lost_reject = start.id
            return "broken"
        return 1.0

    rollouts = make(outcome)
    assert len(delivered(rollouts.round("r.1", 3))) == 3
    assert Counter(started(rollouts))["e0-0.0"] == 2


def test_after_the_engine_was_lost_all_agents_of_the_pool_start_again(
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


def test_a_prompt_whose_last_trajectory_is_given_up_is_not_started_again(make: Callable[..., Any]) -> None:
    fields = {"quota_unit": "sample", "advantage_estimator": "reinforce", "over_sampling_batch_size": 2}
    rollouts = make(lambda start: None if start.task.id == "e0-0.1" else 1.0, **fields)
    assert delivered(rollouts.round("r.1", 1)) == [("e0-0", [1.0])]
    for _ in range(2):
        slow = next(start.id for start in reversed(runner(rollouts).started) if start.task.id == "e0-0.1")
        runner(rollouts).finished(AgentFinished(slow, None, "no result within 600 s"))
        rollouts._rounds.call(lambda: None)
    rollouts.round("r.2", 1)
    assert "e0-0" not in rollouts.pool.prompts
    names = [start.id for start in runner(rollouts).started]
    assert len(set(names)) == len(names)


def test_a_group_that_is_judged_out_while_a_round_begins_is_not_started_again(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    def outcome(start: StartAgent) -> float | None:
        return None if start.task.id.startswith("e0-2.") else float(start.task.index)

    rollouts = make(outcome, dynamic_sampling=True)
    rollouts.round("r.1", 2)
    engine.released.clear()
    for start in [start for start in runner(rollouts).started if start.task.id.startswith("e0-2.")]:
        runner(rollouts).finished(AgentFinished(start.id, 1.0))
    assert engine.rejecting.wait(60)
    threading.Timer(0.2, engine.released.set).start()
    rollouts.round("r.2", 2)
    assert "e0-2" not in rollouts.pool.prompts
    assert Counter(started(rollouts))["e0-2.0"] == 1
    assert len(rollouts.pool) == 1, "the pool was filled again"


def test_a_failure_while_a_reply_is_read(
    make: Callable[..., Any], engine: FakeAgentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last trajectory of a prompt is given up while its other one, which was delivered, is forgotten."""

    def outcome(start: StartAgent) -> float | str | None:
        return (None if start.id.endswith("1") else "broken") if start.task.id == "e0-0.1" else 1.0

    rollouts = make(outcome, quota_unit="sample", advantage_estimator="reinforce", over_sampling_batch_size=2)
    assemble = rollouts._assemble

    def fail_first(*args: Any) -> ScoredRollout:
        engine.rejecting.clear()
        engine.released.clear()
        again = [start.id for start in runner(rollouts).started if start.task.id == "e0-0.1"][-1]
        runner(rollouts).finished(AgentFinished(again, None, "broken"))
        assert engine.rejecting.wait(60)
        threading.Timer(0.2, engine.released.set).start()
        return assemble(*args)

    monkeypatch.setattr(rollouts, "_assemble", fail_first)
    assert delivered(rollouts.round("r.1", 1)) == [("e0-0", [1.0])]
    monkeypatch.setattr(rollouts, "_assemble", assemble)
    rollouts._rounds.call(lambda: None)
    rollouts.round("r.2", 1)
    assert "e0-0" not in rollouts.pool.prompts


def test_an_error_between_two_rounds_ends_the_evaluation_that_follows(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    """Otherwise the agents that the lost engine has ended would not start again."""
    rollouts = make(lambda start: None if start.task.id.startswith("e0-2.") else 1.0, eval_prompt_data="d")
    rollouts.round("r.1", 2)
    engine.lost = True
    for start in [start for start in runner(rollouts).started if start.task.id.startswith("e0-2.")]:
        runner(rollouts).finished(AgentFinished(start.id, None, "connection closed"))
    rollouts._rounds.call(lambda: None)
    engine.lost = False
    with pytest.raises(ServerLostError):
        rollouts.evaluate(1, PromptData([{"input": "a", "label": 0}], rollouts._config))
    FakeRunner.outcome = staticmethod(lambda start: 1.0)  # type: ignore[assignment]
    rollouts.round("r.2", 2)
    assert Counter(started(rollouts))["e0-2.0"] == 2


def test_the_drain_ends_when_all_agents_have_finished(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    rollouts = make(lambda start: None if start.task.id.startswith("e0-2.") else 1.0)
    rollouts.round("r.1", 2)
    rollouts.drop_unstarted()
    assert not rollouts.pool.prompts
    assert sorted(name.rpartition(".")[0] for name in engine.rejected) == ["e0-2.0", "e0-2.1"]


def test_the_drain_keeps_what_has_begun_since_the_last_reply(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    """Agents run between two rounds, and with `after_quota: continue` their requests too."""
    hangs = ("e0-2.", "e0-3.", "e0-4.")
    rollouts = make(
        lambda start: None if start.task.id.startswith(hangs) else 1.0,
        after_quota="continue",
        over_sampling_batch_size=5,
    )
    rollouts.round("r.1", 2)
    names = {start.task.id: start.id for start in runner(rollouts).started}
    engine.tokens[names["e0-3.1"]] = 7
    for task in ("e0-4.0", "e0-4.1"):
        runner(rollouts).finished(AgentFinished(names[task], 1.0))
    rollouts.drop_unstarted()
    assert list(rollouts.pool.prompts) == ["e0-3", "e0-4"]
    assert sorted(engine.rejected) == sorted([names["e0-2.0"], names["e0-2.1"]])


def test_the_drain_starts_again_what_an_answered_round_has_carried(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    """The trainer was killed after the last reply: no agent runs, and none of its prompts is forgotten."""
    rows = [{"group": "g", "id": f"e0-{i}.0.x", "tokens": 5 * i, "state": "parked"} for i in range(2)]
    record = RecordedTrajectory("x", "r", "g", 1.0, {"prompt": "e0-2", "index": 0}, [], [])
    engine.answered["r.1"] = RolloutReply("r.1", "r", 1, "quota", {"trajectories": rows}, {}, [], [record])
    rollouts = make(lambda start: 1.0)
    rollouts.round("r.1", 2)
    rollouts.drop_unstarted()
    assert list(rollouts.pool.prompts) == ["e0-1"]
    assert delivered(rollouts.round("r.2", None, fill=False)) == [("e0-1", [1.0, 1.0])]


def test_after_an_error_later_results_are_not_handled(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    """Each would wait for the lost engine, and all agents start again anyway."""
    rollouts = make(lambda start: None, over_sampling_batch_size=2)
    calls: list[str] = []

    def lose() -> None:
        while len(runner(rollouts).started) < 4:
            pass
        engine.done = lambda *_, reject: calls.append(reject[0]) or engine.raise_lost()  # type: ignore[method-assign]
        for start in list(runner(rollouts).started):
            runner(rollouts).finished(AgentFinished(start.id, None, "connection closed"))

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(ServerLostError):
        rollouts.round("r.1", 2)
    thread.join()
    assert len(calls) == 1


def test_a_prompt_that_replaces_one_between_two_rounds_is_drawn_again_after_a_restart(
    make: Callable[..., Any], engine: FakeAgentEngine
) -> None:
    """The checkpoint has the prompt that was given up, and not the one that was drawn instead."""

    def outcome(start: StartAgent) -> float | None:
        return None if start.task.id.startswith("e0-2.") else float(start.task.index)

    rollouts = make(outcome, dynamic_sampling=True)
    rollouts.round("r.1", 2)
    saved, position = list(rollouts.pool.prompts), rollouts.pool.position
    assert saved == ["e0-2"]
    for start in [start for start in runner(rollouts).started if start.task.id.startswith("e0-2.")]:
        runner(rollouts).finished(AgentFinished(start.id, 1.0))
    reply = rollouts.round("r.2", 2)
    again = make(outcome, dynamic_sampling=True)
    again.pool._data.position = position
    again.pool.restore(saved)
    records = [t for group in reply.groups for t in group.trajectories]
    engine.answered["r.2"] = RolloutReply("r.2", "r", 1, "quota", {"trajectories": []}, {}, [], records)
    assert delivered(again.round("r.2", 2)) == delivered(reply)
    assert again.pool.position == rollouts.pool.position
    assert list(again.pool.prompts) == ["e0-2", *rollouts.pool.prompts]


def test_a_worker_that_cannot_be_started_again_ends_the_run(make: Callable[..., Any]) -> None:
    def outcome(start: StartAgent) -> float:
        raise AgentError("cannot import m")

    with pytest.raises(RunError, match="agent: cannot import m"):
        make(outcome).round("r.1", 2)


def test_an_evaluation_counts_failed_trajectories(make: Callable[..., Any], engine: FakeAgentEngine) -> None:
    fields = {"eval_prompt_data": "d", "n_samples_per_eval_prompt": 2, "eval_temperature": 0.5}
    rollouts = make(lambda start: "broken" if start.task.id == "e0-1.0" else float(start.task.index), **fields)
    config = rollouts._config
    metrics = rollouts.evaluate(3, PromptData([{"input": "a", "label": 0}, {"input": "b", "label": 0}], config))
    assert (metrics["reward"], metrics["prompts"], metrics["unscored"]) == (0.75, 2, 1)
    body = engine.bodies[0]
    assert (body["run"], body["round_id"], body["quota"]) == ("r/eval", "r.eval-3", None)
    assert runner(rollouts).started[0].task.sampling["temperature"] == 0.5


def test_an_evaluation_of_which_every_trajectory_fails_has_no_reward(make: Callable[..., Any]) -> None:
    rollouts = make(lambda start: "broken", eval_prompt_data="d", n_samples_per_eval_prompt=2)
    metrics = rollouts.evaluate(3, PromptData([{"input": "a", "label": 0}], rollouts._config))
    assert (metrics["prompts"], metrics["unscored"]) == (0, 2)
    assert math.isnan(metrics["reward"])
    assert math.isnan(metrics["length_max"])
