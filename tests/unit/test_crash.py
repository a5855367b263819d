"""Restarts with a journal: nothing accepted, generated, finished or delivered is lost (`restart-loses-nothing`)."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from sglang_april.api.messages import Extension, GetState
from sglang_april.scheduler.controller import COUNT_EVERY
from sglang_april.scheduler.restore import RESTARTED, starting_version
from tests.unit.controller_harness import ids, lengths
from tests.unit.crashing_harness import CrashingHarness
from tests.unit.test_conservation import ENGINES, RUNS, Rounds


@pytest.fixture(params=["normal", "overlap"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> CrashingHarness:
    return CrashingHarness(tmp_path / "j", replicas=2, overlap=request.param == "overlap")


def test_partials_restart_from_their_last_suspension(harness: CrashingHarness) -> None:
    harness.open("run", lengths(4, 60, 60))
    assert ids(harness.reply()) == ["p0"]
    suspended = harness.sample("run", "p1").length
    assert suspended > 0
    harness.open("run", {}, quota=None)
    harness.step(5)
    assert harness.drawn("run", "p1") > suspended
    harness.crash()
    assert harness.sample("run", "p1").length == suspended
    reply = harness.reply()
    assert ids(reply) == ["p1", "p2"]
    assert RESTARTED in reply.stats["warnings"]


@pytest.mark.parametrize("reports", [False, True])
def test_running_samples_restart_from_at_most_the_interval_ago(tmp_path: Path, reports: bool) -> None:
    """Or from one count longer ago. Their records are spread over the counts. `reports`: one is made in every step."""
    interval = 4 * COUNT_EVERY
    harness = CrashingHarness(tmp_path / "j", interval=interval, slots=8, pool=2000)
    harness.open("run", {"p": (3, 8, -150)}, quota=None)
    samples = harness.ledger.runs["run"].groups["p"].samples.values()
    harness.step(20)
    harness.recorder.commit()
    recorded = []
    for _ in range(interval):
        before = [s.journal.tokens for s in samples]
        harness.step()
        if reports:
            harness.command(GetState)
        recorded.append(sum(s.journal.tokens > b for s, b in zip(samples, before, strict=True)))
    assert sorted(recorded) == [0] * (interval - 4) + [2] * 4
    drawn = {s.index: harness.engine.output_length(s) for s in samples}
    harness.recorder.commit()
    harness.crash()
    for sample in harness.ledger.runs["run"].groups["p"].samples.values():
        assert drawn[sample.index] - interval - COUNT_EVERY < sample.length <= drawn[sample.index]
    assert ids(harness.reply()) == ["p"]


def test_a_round_whose_end_was_not_journalled_ends_again(harness: CrashingHarness) -> None:
    harness.open("run", lengths(3, 60))
    while harness.sample("run", "p0").state.value != "finished":
        harness.step()
    harness.recorder.commit()
    harness.crash()
    assert ids(harness.reply()) == ["p0"]


def test_the_answer_to_an_extend_with_a_key_is_restored(harness: CrashingHarness) -> None:
    harness.open("run", lengths(60, 60))
    assert harness.extend("run", 1, {"q": (3, 1, -8)}, "key") == 200
    harness.crash()
    (restored,) = harness.saved.rounds
    answer = {"quota": 2, "counted": 0, "incarnations": [0]}
    assert restored.spec.extensions == {"key": Extension("digest of key", answer)}


def run_ahead(harness: CrashingHarness) -> None:
    """A round ends and its run generates three steps beyond it."""
    harness.open("run", lengths(3, 60, 60), after_quota="continue")
    harness.reply()
    harness.step(3)
    assert harness.ahead["run"].generated > 0


def test_nothing_runs_ahead_after_a_restart_and_its_metrics_are_lost(harness: CrashingHarness) -> None:
    run_ahead(harness)
    harness.crash()
    forwards = harness.engine.forwards
    harness.step(3)
    assert harness.engine.forwards == forwards
    harness.open("run", {}, quota=None)
    assert harness.reply().stats["ahead"] is None


def test_metrics_of_running_ahead_are_lost_with_a_crash_in_the_next_round(harness: CrashingHarness) -> None:
    run_ahead(harness)
    harness.open("run", {}, quota=None)
    harness.crash()
    reply = harness.reply()
    assert reply.stats["ahead"] is None
    assert RESTARTED in reply.stats["warnings"]


def test_after_a_restart_nothing_steps_until_the_version_is_named(harness: CrashingHarness) -> None:
    harness.open("run", lengths(60))
    harness.step(3)
    assert harness.push_begin() == 200
    assert harness.push_end(7) == 200
    harness.crash()
    before = harness.engine.forwards
    harness.step(3)
    assert harness.engine.forwards == before
    assert harness.open("other", lengths(3)).status == 503
    harness.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
    assert "journal" in harness.controller.context.clock.closed, "one bucket of weights names no version"
    assert harness.push_begin(6) == 409
    assert harness.push_begin(7) == 200
    assert harness.push_end() == 200
    assert harness.controller.context.clock.version == 7, "the same policy again"
    harness.drain()


def test_a_push_without_a_version_after_a_restart_adds_one(harness: CrashingHarness) -> None:
    harness.push_begin()
    harness.push_end(4)
    harness.crash()
    harness.push_begin()
    harness.push_end()
    assert harness.version == 5
    harness.crash()
    harness.do(lambda e: e.weight_call(ok=True, whole=True, flush=False))
    assert (harness.version, harness.controller.context.clock.closed) == (6, "")


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
    """All events of `Rounds`, and crashes."""

    @initialize(
        engine=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in ENGINES.items()}),
        interval=st.sampled_from((1, 3, 256)),
    )
    def start(self, engine: dict[str, Any], interval: int = 256) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.harness = CrashingHarness(Path(self.folder.name) / "j", replicas=2, interval=interval, **engine)
        self.foreign_requests = 0

    @rule(run=st.sampled_from(RUNS))
    def delete_replies(self, run: str) -> None:
        self.harness.delete_replies(run)

    @rule(written=st.booleans())
    def crash(self, written: bool) -> None:
        if written:
            self.harness.recorder.commit()
        self.harness.crash()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            self.harness.close()
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
