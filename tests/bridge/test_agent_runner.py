"""Agent functions in real worker processes: rewards, exceptions, timeouts, cancellation, and processes that die."""

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_bridge import agent_runner
from trainer_bridge.agent_runner import AgentError, AgentRunner
from trainer_bridge.agents import AgentFinished, AgentTask, StartAgent

FUNCTIONS = Path(__file__).with_name("agent_functions.py")
LIMIT_S = 240.0
Results = "queue.Queue[AgentFinished]"


def start(name: str, content: Any, index: int = 0) -> StartAgent:
    return StartAgent(name, AgentTask(name, index, content, None, None, {}), {"x-april-trajectory": name})


@pytest.fixture
def run() -> Iterator[Callable[..., tuple[AgentRunner, "queue.Queue[AgentFinished]"]]]:
    runners: list[AgentRunner] = []

    def make(name: str = "behaves", timeout: float = 120.0, workers: int = 1) -> Any:
        results: queue.Queue[AgentFinished] = queue.Queue()
        runners.append(AgentRunner(f"{FUNCTIONS}:{name}", workers, timeout, "http://127.0.0.1:9", None, results.put))
        return runners[-1], results

    yield make
    for runner in runners:
        runner.close()


def finished(results: "queue.Queue[AgentFinished]", count: int) -> dict[str, AgentFinished]:
    ends = [results.get(timeout=LIMIT_S) for _ in range(count)]
    assert results.empty()
    return {end.id: end for end in ends}


def test_many_agents_run_at_the_same_time_and_each_has_its_reward(run: Callable[..., Any]) -> None:
    runner, results = run("length", workers=2)
    for i in range(40):
        runner.start("r", start(f"t{i}", "x" * i, i % 4))
    ends = finished(results, 40)
    assert [ends[f"t{i}"].reward for i in range(40)] == [i + i % 4 / 10 for i in range(40)]


def test_the_client_has_the_headers_of_its_trajectory_and_repeats_nothing(run: Callable[..., Any]) -> None:
    runner, results = run("headers")
    for i in range(3):
        runner.start("r", start(f"t{i}", ""))
    assert [end.reward for end in finished(results, 3).values()] == [1.0] * 3


def test_exceptions_and_rewards_that_are_no_number_name_the_problem(run: Callable[..., Any]) -> None:
    runner, results = run()
    for content in ("raises", "nan", "text", "asks", "works"):
        runner.start("r", start(content, content))
    ends = finished(results, 5)
    assert ends["works"].reward == 1.0
    assert "KeyError('no such tool') at" in ends["raises"].problem
    assert "agent_functions.py:" in ends["raises"].problem
    assert "the reward is nan" in ends["nan"].problem
    assert "could not convert string" in ends["text"].problem
    assert "APIConnectionError" in ends["asks"].problem
    assert [name for name, end in ends.items() if end.reward is not None] == ["works"]


def test_a_timeout_ends_only_its_trajectory(run: Callable[..., Any]) -> None:
    runner, results = run(timeout=1.0)
    with runner.clock("r"):
        runner.start("r", start("slow", "sleeps"))
        ends = finished(results, 1)
        assert ends["slow"].problem == "not finished after 1 s"
        runner.start("r", start("next", "works"))
        assert finished(results, 1)["next"].reward == 1.0


def test_the_clock_runs_only_for_runs_with_an_open_round(run: Callable[..., Any]) -> None:
    runner, results = run(timeout=0.5)
    runner.start("closed", start("waits", "sleeps"))
    with runner.clock("open"):
        runner.start("open", start("slow", "sleeps"))
        assert finished(results, 1).keys() == {"slow"}
    with runner.clock("closed"):
        assert finished(results, 1).keys() == {"waits"}


def test_a_cancelled_trajectory_is_not_reported(run: Callable[..., Any]) -> None:
    runner, results = run()
    runner.start("r", start("a", "sleeps"))
    assert runner.cancel(["a", "unknown"]) == ["a"]
    runner.start("r", start("b", "works"))
    assert finished(results, 1).keys() == {"b"}


@pytest.mark.parametrize("content", ["blocks", "ignores cancellation"])
def test_a_worker_that_does_not_confirm_a_cancellation_is_replaced(
    run: Callable[..., Any], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_runner, "CANCEL_TIMEOUT_S", 1.0)
    runner, results = run(timeout=1.0)
    with runner.clock("r"):
        runner.start("r", start("hangs", content))
        assert finished(results, 1)["hangs"].problem == "not finished after 1 s"
    runner.start("r", start("next", "works" if content == "ignores cancellation" else "sleeps"))
    while (end := results.get(timeout=LIMIT_S)).problem == "the agent process died":
        runner.start("r", start("next", "works"))
    assert (end.id, end.reward) == ("next", 1.0)


def test_all_trajectories_of_a_process_that_dies_are_reported(run: Callable[..., Any]) -> None:
    runner, results = run()
    runner.start("r", start("a", "sleeps"))
    runner.start("r", start("b", "dies"))
    assert {end.problem for end in finished(results, 2).values()} == {"the agent process died"}
    runner.start("r", start("c", "works"))
    assert finished(results, 1)["c"].reward == 1.0


def test_nothing_is_reported_after_close(run: Callable[..., Any]) -> None:
    runner, results = run()
    runner.start("r", start("a", "sleeps"))
    runner.close()
    assert results.empty()


def test_a_function_that_cannot_be_imported_ends_the_start(run: Callable[..., Any]) -> None:
    with pytest.raises(AgentError, match=r"missing.*AttributeError"):
        run("missing")
