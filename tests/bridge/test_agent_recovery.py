"""Agents against a fake engine: errors, lost engines, and what a resumed run or its drain starts again."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sglang_april.client import RolloutReply, ServerLostError
from tests.bridge.fake_agents import FakeAgentEngine, FakeRunner, delivered, end_agents, runner, started
from trainer_bridge.agent_runner import AgentError
from trainer_bridge.agents import AgentFinished, StartAgent
from trainer_bridge.data import PromptData
from trainer_bridge.validate import RunError


def all_but_one(start: StartAgent) -> float | None:
    """An outcome: all agents end at once but those of prompt e0-2."""
    return None if start.task.id.startswith("e0-2.") else float(start.task.index)


def test_after_the_engine_was_lost_all_agents_of_the_pool_start_again(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    hangs = True
    rollouts = make_agents(lambda start: None if hangs else 1.0)

    def lose() -> None:
        while len(runner(rollouts).started) < 6:
            pass
        with agent_engine.change():
            agent_engine.lost = True

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(ServerLostError):
        rollouts.round("r.1", 2)
    thread.join()
    before = [start.id for start in runner(rollouts).started]
    assert sorted(runner(rollouts).cancelled) == sorted(before)
    assert not rollouts.pool.prompts
    agent_engine.lost = hangs = False
    rollout = rollouts.round("r.1", 2)
    assert [prompt for prompt, _ in delivered(rollout)] == ["e0-0", "e0-1"]
    assert not set(before) & {start.id for start in runner(rollouts).started[6:]}
    assert agent_engine.bodies[0] == agent_engine.bodies[1]
    assert agent_engine.dropped == ["r", "r"]


def test_a_round_that_was_answered_before_a_restart_starts_no_agent(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    agent_engine.has_answered("r.1", [("e0-1", 0), ("e0-1", 1)])
    rollouts = make_agents(lambda start: 1.0)
    assert delivered(rollouts.round("r.1", 2)) == [("e0-1", [1.0, 1.0])]
    assert started(rollouts) == []
    rollouts.round("r.2", 2)
    assert set(started(rollouts)) == {f"e0-{i}.{j}" for i in (0, 2, 3) for j in range(2)}


def test_a_group_that_is_judged_out_while_a_round_begins_is_not_started_again(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    rollouts = make_agents(all_but_one, dynamic_sampling=True)
    rollouts.round("r.1", 2)
    agent_engine.released.clear()
    end_agents(rollouts, "e0-2", 1.0)
    assert agent_engine.rejecting.wait(60)
    threading.Timer(0.2, agent_engine.released.set).start()
    rollouts.round("r.2", 2)
    assert "e0-2" not in rollouts.pool.prompts
    assert Counter(started(rollouts))["e0-2.0"] == 1
    assert len(rollouts.pool) == 1, "the pool was filled again"


def test_a_failure_while_a_reply_is_read(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last trajectory of a prompt is given up while its other one, which was delivered, is forgotten."""

    def outcome(start: StartAgent) -> float | str | None:
        return (None if start.id.endswith("1") else "broken") if start.task.id == "e0-0.1" else 1.0

    rollouts = make_agents(outcome, quota_unit="sample", advantage_estimator="reinforce", over_sampling_batch_size=2)
    wait = rollouts._open_and_wait

    def fail_after(*args: Any) -> RolloutReply:
        reply = wait(*args)
        agent_engine.rejecting.clear()
        agent_engine.released.clear()
        again = [start.id for start in runner(rollouts).started if start.task.id == "e0-0.1"][-1]
        runner(rollouts).finished(AgentFinished(again, None, "broken"))
        assert agent_engine.rejecting.wait(60)
        threading.Timer(0.2, agent_engine.released.set).start()
        return reply

    monkeypatch.setattr(rollouts, "_open_and_wait", fail_after)
    assert delivered(rollouts.round("r.1", 1)) == [("e0-0", [1.0])]
    monkeypatch.setattr(rollouts, "_open_and_wait", wait)
    rollouts._rounds.call(lambda: None)
    rollouts.round("r.2", 1)
    assert "e0-0" not in rollouts.pool.prompts


def test_an_error_between_two_rounds_ends_the_evaluation_that_follows(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """Otherwise the agents that the lost engine has ended would not start again."""
    rollouts = make_agents(lambda start: None if start.task.id.startswith("e0-2.") else 1.0, eval_prompt_data="d")
    rollouts.round("r.1", 2)
    agent_engine.lost = True
    end_agents(rollouts, "e0-2", None, "connection closed")
    rollouts._rounds.call(lambda: None)
    agent_engine.lost = False
    with pytest.raises(ServerLostError):
        rollouts.evaluate(1, PromptData([{"input": "a", "label": 0}], rollouts._config))
    FakeRunner.outcome = staticmethod(lambda start: 1.0)  # type: ignore[assignment]
    rollouts.round("r.2", 2)
    assert Counter(started(rollouts))["e0-2.0"] == 2


def test_the_drain_ends_when_all_agents_have_finished(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    rollouts = make_agents(lambda start: None if start.task.id.startswith("e0-2.") else 1.0)
    rollouts.round("r.1", 2)
    rollouts.drop_unstarted()
    assert not rollouts.pool.prompts
    assert sorted(name.rpartition(".")[0] for name in agent_engine.rejected) == ["e0-2.0", "e0-2.1"]


def test_the_drain_keeps_what_has_begun_since_the_last_reply(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """Agents run between two rounds, and with `after_quota: continue` their requests too."""
    hangs = ("e0-2.", "e0-3.", "e0-4.")
    rollouts = make_agents(
        lambda start: None if start.task.id.startswith(hangs) else 1.0,
        after_quota="continue",
        over_sampling_batch_size=5,
    )
    rollouts.round("r.1", 2)
    names = {start.task.id: start.id for start in runner(rollouts).started}
    agent_engine.tokens[names["e0-3.1"]] = 7
    for task in ("e0-4.0", "e0-4.1"):
        runner(rollouts).finished(AgentFinished(names[task], 1.0))
    rollouts.drop_unstarted()
    assert list(rollouts.pool.prompts) == ["e0-3", "e0-4"]
    assert sorted(agent_engine.rejected) == sorted([names["e0-2.0"], names["e0-2.1"]])


def test_the_drain_starts_again_what_an_answered_round_has_carried(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """The trainer was killed after the last reply: no agent runs, and none of its prompts is forgotten."""
    rows = [{"group": "g", "id": f"e0-{i}.0.x", "tokens": 5 * i, "state": "parked"} for i in range(2)]
    agent_engine.has_answered("r.1", [("e0-2", 0)], rows)
    rollouts = make_agents(lambda start: 1.0)
    rollouts.round("r.1", 2)
    rollouts.drop_unstarted()
    assert list(rollouts.pool.prompts) == ["e0-1"]
    assert delivered(rollouts.round("r.2", None, fill=False)) == [("e0-1", [1.0, 1.0])]


def test_after_an_error_later_results_are_not_handled(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """Each would wait for the lost engine, and all agents start again anyway."""
    rollouts = make_agents(lambda start: None, over_sampling_batch_size=2)
    calls: list[str] = []

    def lose() -> None:
        while len(runner(rollouts).started) < 4:
            pass
        agent_engine.done = lambda *_, reject: calls.append(reject[0]) or agent_engine.raise_lost()  # type: ignore[method-assign]
        for start in list(runner(rollouts).started):
            runner(rollouts).finished(AgentFinished(start.id, None, "connection closed"))

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(ServerLostError):
        rollouts.round("r.1", 2)
    thread.join()
    assert len(calls) == 1


def test_a_prompt_that_replaces_one_between_two_rounds_is_drawn_again_after_a_restart(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """The checkpoint has the prompt that was given up, and not the one that was drawn instead."""
    rollouts = make_agents(all_but_one, dynamic_sampling=True)
    rollouts.round("r.1", 2)
    saved, position = list(rollouts.pool.prompts), rollouts.pool.position
    assert saved == ["e0-2"]
    end_agents(rollouts, "e0-2", 1.0)
    reply = rollouts.round("r.2", 2)
    again = make_agents(all_but_one, dynamic_sampling=True)
    again.pool._data.position = position
    again.pool.restore(saved)
    records = [t for group in reply.groups for t in group.trajectories]
    agent_engine.answered["r.2"] = RolloutReply("r.2", "r", 1, "quota", {"trajectories": []}, {}, [], records)
    assert delivered(again.round("r.2", 2)) == delivered(reply)
    assert again.pool.position == rollouts.pool.position
    assert list(again.pool.prompts) == ["e0-2", *rollouts.pool.prompts]


def test_a_worker_that_cannot_be_started_again_ends_the_run(make_agents: Callable[..., Any]) -> None:
    def outcome(start: StartAgent) -> float:
        raise AgentError("cannot import m")

    with pytest.raises(RunError, match="agent: cannot import m"):
        make_agents(outcome).round("r.1", 2)


def test_the_drain_of_a_resumed_run_starts_everything_again(make_agents: Callable[..., Any]) -> None:
    """The trainer was killed in its drain: no reply tells which of the prompts have drawn a token."""
    rollouts = make_agents(lambda start: 1.0)
    rollouts.pool.restore(["e0-0", "e0-1"])
    rollouts.drop_unstarted()
    assert delivered(rollouts.round("r.2", None, fill=False)) == [("e0-0", [1.0, 1.0]), ("e0-1", [1.0, 1.0])]


def test_an_answered_round_keeps_prompts_that_it_has_delivered_in_part(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    agent_engine.has_answered("r.1", [("e0-0", 0)])
    rollouts = make_agents(lambda start: 1.0, quota_unit="sample", advantage_estimator="reinforce")
    assert delivered(rollouts.round("r.1", 1)) == [("e0-0", [1.0])]
    rollouts.round("r.2", 4)
    assert {"e0-0.0", "e0-0.1"} <= set(started(rollouts))


def test_an_engine_that_no_longer_has_the_run_gets_all_agents_again(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """It was restarted between two rounds, while no agent had a request that could fail."""
    rollouts = make_agents(lambda start: 1.0)
    rollouts.round("r.1", 2)
    agent_engine.done_.clear()
    rollouts.engines_with_carry = set()
    assert [prompt for prompt, _ in delivered(rollouts.round("r.2", 2))] == ["e0-2", "e0-3"]


def test_deliveries_before_the_engine_was_lost_count(
    make_agents: Callable[..., Any], agent_engine: FakeAgentEngine
) -> None:
    """The engine has answered the second round, but the answer was lost: of the prompt nothing is left."""
    rollouts = make_agents(lambda start: 1.0, quota_unit="sample", advantage_estimator="reinforce")
    assert delivered(rollouts.round("r.1", 1)) == [("e0-0", [1.0])]
    rollouts._abandon()
    agent_engine.has_answered("r.2", [("e0-0", 1)])
    assert delivered(rollouts.round("r.2", 1)) == [("e0-0", [1.0])]
    assert "e0-0" not in rollouts.pool.prompts
