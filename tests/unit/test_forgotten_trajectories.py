"""What is forgotten of trajectories, so that memory and journal stay bounded where no caller ends them."""

import pytest

from sglang_april.api import messages
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.trajectory_run import TrajectoryRun
from tests.unit.leg_harness import PROMPT, LegHarness


@pytest.fixture
def w() -> LegHarness:
    return LegHarness()


def test_trajectories_without_rounds_are_forgotten(w: LegHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_april.scheduler.trajectory_run.MAX_WITHOUT_ROUNDS", 3)
    for i in range(6):
        w.leg("run", f"r{i}", PROMPT, 2, f"t{i}")
        w.step(6)
    assert list(w.context.trajectories["run"].active) == ["t3", "t4", "t5"]
    assert [event.ids for event in w.of(messages.TrajectoriesRemoved)] == [["t0"], ["t1"], ["t2"]]


def test_done_trajectories_without_rounds_are_forgotten_too(w: LegHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of the run counts and delivers those that are left."""
    monkeypatch.setattr("sglang_april.scheduler.trajectory_run.MAX_WITHOUT_ROUNDS", 2)
    for i in range(5):
        w.leg("run", f"r{i}", PROMPT, 2, f"t{i}")
        w.step(6)
        w.done("run", f"t{i}")
    known = w.context.trajectories["run"]
    assert [t.id for t in known.done] == list(known.active) == ["t3", "t4"]
    assert w.done("run", "t0").status == 200, "it is still known that it was done"
    w.open("run", 2)
    assert w.of(messages.RoundEnded)[0].trajectories == ["t3", "t4"]


def test_runs_without_rounds_are_forgotten(w: LegHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """With records and parked KV, the least recently used first; not one that has a round, or a leg that waits."""
    monkeypatch.setattr("sglang_april.scheduler.trajectory_ends.MAX_RUNS", 4)
    w.open("training", None)
    w.leg("busy", "busy", PROMPT, 90, "t")
    for i in range(4):
        w.leg(f"eval-{i}", f"r{i}", PROMPT, 2, "t")
        w.step(6)
        if i == 1:
            w.leg("eval-0", "again", PROMPT, 2, "t")
            w.step(6)
    assert set(w.context.trajectories) == {"training", "busy", "eval-2", "eval-3"}
    assert [(e.run, e.ids) for e in w.of(messages.TrajectoriesRemoved)] == [
        ("eval-1", ["t"]),
        ("eval-0", ["t"]),
    ]
    w.abort("busy")
    for run in ("busy", "eval-2", "eval-3"):
        w.command(messages.Drop, run=run)
    assert len(w.engine.free) == w.engine.pool, "parked KV of forgotten runs is freed"


def test_runs_whose_rounds_have_delivered_everything_are_forgotten(
    w: LegHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run per evaluation: they cost no other run its records."""
    monkeypatch.setattr("sglang_april.scheduler.trajectory_ends.MAX_RUNS", 2)
    for i in range(5):
        w.open(f"eval-{i}", 1)
        w.leg(f"eval-{i}", f"r{i}", PROMPT, 2, "t")
        w.step(6)
        w.done(f"eval-{i}", "t")
        w.step()
    w.leg("x", "rx", PROMPT, 2, "t")
    w.step(6)
    w.leg("y", "ry", PROMPT, 2, "t")
    w.step(6)
    assert set(w.context.trajectories) == {"x", "y"}
    assert [(e.run, e.ids) for e in w.of(messages.TrajectoriesRemoved)] == []


def test_a_restart_remembers_no_more_ended_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_april.scheduler.trajectory_run.MAX_ENDED", 2)
    run = TrajectoryRun("run", Run("legs"))
    run.restore([messages.SavedTrajectory("run", f"t{i}", "g", "left", 0, "done", i, b"") for i in range(4)])
    assert list(run.ended) == ["t2", "t3"]
