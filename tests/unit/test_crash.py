"""Restarts: what was accepted, drawn, finished and delivered before a crash is there after it."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from sglang_april.scheduler.restore import RESTARTED, starting_version
from tests.unit.controller_harness import ids, lengths
from tests.unit.crashing_harness import CrashingHarness
from tests.unit.test_conservation import ENGINES, Rounds


@pytest.fixture(params=["normal", "overlap"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> CrashingHarness:
    return CrashingHarness(tmp_path / "j", replicas=2, overlap=request.param == "overlap")


def test_partials_restart_from_their_last_suspension(world: CrashingHarness) -> None:
    world.open("run", lengths(4, 60, 60))
    assert ids(world.reply()) == ["p0"]
    suspended = world.sample("run", "p1").length
    assert suspended > 0
    world.open("run", {}, quota=None)
    world.step(5)
    assert world.sample("run", "p1").length > suspended
    world.crash()
    assert world.sample("run", "p1").length == suspended
    reply = world.reply()
    assert ids(reply) == ["p1", "p2"]
    assert RESTARTED in reply.stats["warnings"]


def test_a_round_whose_end_was_not_journalled_ends_again(world: CrashingHarness) -> None:
    world.open("run", lengths(3, 60))
    while world.sample("run", "p0").state.value != "finished":
        world.step()
    world.recorder.commit()
    world.crash()
    assert ids(world.reply()) == ["p0"]


def run_ahead(world: CrashingHarness) -> None:
    """A round ends and its run generates three steps beyond it."""
    world.open("run", lengths(3, 60, 60), after_quota="continue")
    world.reply()
    world.step(3)
    assert world.ahead["run"].generated > 0


def test_nothing_runs_ahead_after_a_restart_and_its_figures_are_lost(world: CrashingHarness) -> None:
    run_ahead(world)
    world.crash()
    forwards = world.engine.forwards
    world.step(3)
    assert world.engine.forwards == forwards
    world.open("run", {}, quota=None)
    assert world.reply().stats["ahead"] is None


def test_figures_of_running_ahead_are_lost_with_a_crash_in_the_next_round(world: CrashingHarness) -> None:
    run_ahead(world)
    world.open("run", {}, quota=None)
    world.crash()
    reply = world.reply()
    assert reply.stats["ahead"] is None
    assert RESTARTED in reply.stats["warnings"]


def test_after_a_restart_nothing_steps_until_the_version_is_named(world: CrashingHarness) -> None:
    world.open("run", lengths(60))
    world.step(3)
    assert world.push_begin() == 200
    assert world.push_end(7) == 200
    world.crash()
    before = world.engine.forwards
    world.step(3)
    assert world.engine.forwards == before
    assert world.open("other", lengths(3)).status == 503
    world.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
    assert "journal" in world.controller.context.clock.closed, "one bucket of weights names no version"
    assert world.push_begin(6) == 409
    assert world.push_begin(7) == 200
    assert world.push_end() == 200
    assert world.controller.context.clock.version == 7, "the same policy again"
    world.drain()


def test_a_push_without_a_version_after_a_restart_adds_one(world: CrashingHarness) -> None:
    world.push_begin()
    world.push_end(4)
    world.crash()
    world.push_begin()
    world.push_end()
    assert world.version == 5
    world.crash()
    world.do(lambda e: e.weight_call(ok=True, whole=True, flush=False))
    assert (world.version, world.controller.context.clock.closed) == (6, "")


@pytest.mark.parametrize(
    ("given", "saved", "starts_at"),
    [(None, 0, (0, False)), (None, 3, (3, True)), (3, 3, (3, False)), (5, 3, (5, False)),
     (4, 0, (4, False))],
)  # fmt: skip
def test_starting_version(given: int | None, saved: int, starts_at: tuple[int, bool]) -> None:
    assert starting_version(given, saved) == starts_at


def test_a_version_below_the_journal_s_is_refused() -> None:
    with pytest.raises(ValueError, match="--april-version 2 is below 3"):
        starting_version(2, 3)


class Restarts(Rounds):
    """All that can happen, and now and then the end of the process."""

    @initialize(engine=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in ENGINES.items()}))
    def start(self, engine: dict[str, Any]) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.world = CrashingHarness(Path(self.folder.name) / "j", replicas=2, **engine)
        self.strangers = 0

    @rule(written=st.booleans())
    def crash(self, written: bool) -> None:
        if written:
            self.world.recorder.commit()
        self.world.crash()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.world.close()
            self.folder.cleanup()


def test_any_sequence_of_events_survives_any_number_of_crashes() -> None:
    run_state_machine_as_test(
        Restarts,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
