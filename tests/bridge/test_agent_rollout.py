"""Rounds of agents against a fake engine: which are started, repeated, replaced and evaluated."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.bridge.fake_agents import FakeAgentEngine, delivered, runner, started
from trainer_bridge.agents import AgentFinished, StartAgent
from trainer_bridge.data import PromptData
from trainer_bridge.validate import RunError


def test_groups_are_ended_together_and_carried_ones_are_not_started_again(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    rollouts = make_agents(lambda start: float(start.task.index))
    first = rollouts.round("r.1", 2)
    assert delivered(first) == [("e0-0", [0.0, 1.0]), ("e0-1", [0.0, 1.0])]
    assert list(rollouts.pool.prompts) == ["e0-2"]
    second = rollouts.round("r.2", 2)
    assert delivered(second)[0] == ("e0-2", [0.0, 1.0])
    assert started(rollouts) == [f"e0-{i}.{j}" for i in range(5) for j in range(2)]
    assert agent_engine.dropped == ["r"], "only before the first round"
    assert agent_engine.bodies[0]["trajectories"]
    assert (agent_engine.bodies[0]["n"], agent_engine.bodies[0]["quota"], "prompts" in agent_engine.bodies[0]) == (
        2,
        2,
        False,
    )
    groups = {start.headers["x-april-group"] for start in runner(rollouts).started}
    assert len(groups) == 5


def test_the_seed_of_a_trajectory_is_the_same_in_every_attempt_and_run(make_agents: Callable[..., Any]) -> None:
    rollouts = make_agents(lambda start: "broken" if start.task.id == "e0-0.0" and start.id.endswith("0") else 1.0)
    rollouts.round("r.1", 2)
    again = make_agents(lambda start: 1.0)
    again.round("r.1", 2)
    seeds = {start.task.id: start.task.sampling["seed"] for start in runner(again).started}
    assert all(start.task.sampling["seed"] == seeds[start.task.id] for start in runner(rollouts).started)
    assert len(set(seeds.values())) == len(seeds)


def test_a_failed_trajectory_is_rejected_logged_and_repeated(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    failed: list[str] = []

    def outcome(start: StartAgent) -> float | str:
        if start.task.id == "e0-0.1" and not failed:
            failed.append(start.id)
            return "KeyError('no such tool')"
        return 1.0

    rollouts = make_agents(outcome)
    rollout = rollouts.round("r.1", 2)
    assert delivered(rollout)[0][0] in ("e0-0", "e0-1")
    assert agent_engine.rejected == failed
    assert make_agents.warnings == [f"trajectory {failed[0]} is rejected, and repeated: KeyError('no such tool')"]  # type: ignore[attr-defined]
    assert rollout.problems == make_agents.warnings  # type: ignore[attr-defined]
    assert Counter(started(rollouts))["e0-0.1"] == 2


def test_a_group_whose_agent_fails_twice_is_given_up_and_replaced(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    rollouts = make_agents(lambda start: "broken" if start.task.id == "e0-1.0" else 1.0)
    rollout = rollouts.round("r.1", 3)
    assert [prompt for prompt, _ in delivered(rollout)] == ["e0-0", "e0-2", "e0-3"]
    assert (rollout.unscored, rollout.replaced) == (1, 1)
    assert "e0-1" not in rollouts.pool.prompts
    assert not any(name.startswith("e0-1.") for name in agent_engine.done_)


def test_with_dynamic_sampling_groups_of_equal_rewards_are_rejected(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    rollouts = make_agents(
        lambda start: 1.0 if start.task.id.startswith("e0-0.") else float(start.task.index), dynamic_sampling=True
    )
    rollout = rollouts.round("r.1", 3)
    assert [prompt for prompt, _ in delivered(rollout)] == ["e0-1", "e0-2", "e0-3"]
    assert (rollout.rejected, rollout.unscored, rollout.replaced) == (1, 0, 1)
    assert len([name for name in agent_engine.rejected if name.startswith("e0-0.")]) == 2


def test_an_agent_that_always_fails_ends_the_run(make_agents: Callable[..., Any]) -> None:
    with pytest.raises(RunError, match=r"32 trajectories in a row failed, the last one: broken"):
        make_agents(lambda start: "broken").round("r.1", 2)


@pytest.mark.parametrize(
    ("outcomes", "dynamic", "message"),
    [((1.0, 1.0), True, "all its rewards are equal"), ((1.0, "broken"), False, "broken")],
)
def test_groups_that_can_never_be_trained_on_end_the_run(
    make_agents: Callable[..., Any], outcomes: tuple[float | str, ...], dynamic: bool, message: str
) -> None:
    """After ten times the quota of 2, although not all trajectories fail."""

    def outcome(start: StartAgent) -> float | str:
        row = int(start.task.id.partition(".")[0].removeprefix("e0-"))
        return outcomes[start.task.index] if row < 40 else float(start.task.index)

    with pytest.raises(RunError, match=f"^21 groups of one round cannot be trained on. The last one: .*{message}"):
        make_agents(outcome, dynamic_sampling=dynamic).round("r.1", 2)


def test_an_agent_that_makes_no_request_has_failed(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    def outcome(start: StartAgent) -> float:
        if start.task.id == "e0-0.0" and start.id.endswith("0"):
            agent_engine.unknown.add(start.id)
        return 1.0

    rollouts = make_agents(outcome)
    assert [prompt for prompt, _ in delivered(rollouts.round("r.1", 2))] == ["e0-1", "e0-2"]
    assert "made no request" in make_agents.warnings[0]  # type: ignore[attr-defined]
    assert delivered(rollouts.round("r.2", 1)) == [("e0-0", [1.0, 1.0])]


def test_an_agent_that_fails_on_an_engine_without_the_run_is_repeated(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """The engine was restarted without a journal, and has nothing to delete."""

    def outcome(start: StartAgent) -> float | str:
        if start.task.id == "e0-0.0" and start.id.endswith("0"):
            agent_engine.lost_reject = start.id
            return "broken"
        return 1.0

    rollouts = make_agents(outcome)
    assert len(delivered(rollouts.round("r.1", 3))) == 3
    assert Counter(started(rollouts))["e0-0.0"] == 2


def test_single_trajectories_are_a_quota_too(make_agents: Callable[..., Any], agent_engine: FakeAgentEngine) -> None:
    rollouts = make_agents(
        lambda start: 1.0, quota_unit="sample", advantage_estimator="reinforce", over_sampling_batch_size=2
    )
    assert delivered(rollouts.round("r.1", 3)) == [("e0-0", [1.0, 1.0]), ("e0-1", [1.0])]
    assert list(rollouts.pool.prompts) == ["e0-1"]
    assert "n" not in agent_engine.bodies[0]


def test_a_prompt_whose_last_trajectory_is_given_up_is_not_started_again(make_agents: Callable[..., Any]) -> None:
    fields = {"quota_unit": "sample", "advantage_estimator": "reinforce", "over_sampling_batch_size": 2}
    rollouts = make_agents(lambda start: None if start.task.id == "e0-0.1" else 1.0, **fields)
    assert delivered(rollouts.round("r.1", 1)) == [("e0-0", [1.0])]
    for _ in range(2):
        slow = next(start.id for start in reversed(runner(rollouts).started) if start.task.id == "e0-0.1")
        runner(rollouts).finished(AgentFinished(slow, None, "no result within 600 s"))
        rollouts._rounds.call(lambda: None)
    rollouts.round("r.2", 1)
    assert "e0-0" not in rollouts.pool.prompts
    names = [start.id for start in runner(rollouts).started]
    assert len(set(names)) == len(names)


def test_an_evaluation_counts_failed_trajectories(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    fields = {"eval_prompt_data": "d", "n_samples_per_eval_prompt": 2, "eval_temperature": 0.5}
    rollouts = make_agents(lambda start: "broken" if start.task.id == "e0-1.0" else float(start.task.index), **fields)
    config = rollouts._config
    metrics = rollouts.evaluate(3, PromptData([{"input": "a", "label": 0}, {"input": "b", "label": 0}], config))
    assert (metrics["reward"], metrics["prompts"], metrics["unscored"]) == (0.75, 2, 1)
    body = agent_engine.bodies[0]
    assert (body["run"], body["round_id"], body["quota"]) == ("r/eval", "r.eval-3", None)
    assert runner(rollouts).started[0].task.sampling["temperature"] == 0.5


def test_an_evaluation_of_which_every_trajectory_fails_has_no_reward(make_agents: Callable[..., Any]) -> None:
    rollouts = make_agents(lambda start: "broken", eval_prompt_data="d", n_samples_per_eval_prompt=2)
    metrics = rollouts.evaluate(3, PromptData([{"input": "a", "label": 0}], rollouts._config))
    assert (metrics["prompts"], metrics["unscored"]) == (0, 2)
    assert math.isnan(metrics["reward"])
    assert math.isnan(metrics["length_max"])
