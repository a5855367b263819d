"""`after_quota: continue` and `quota_mode: cohort` on the fake engine."""

import pytest

from sglang_april.api import messages
from sglang_april.scheduler.controller import COUNT_EVERY
from sglang_april.scheduler.state import State
from tests.unit.controller_harness import Build, ids, lengths

# --- running ahead


def test_generation_continues_after_the_reply_into_the_next_round(harness: Build) -> None:
    """No sample leaves the batch, and the next reply begins with what has finished meanwhile."""
    w = harness()
    w.open("run", lengths(2, 5, 40, 40), quota=1, ahead=2, after_quota="continue")
    reply = w.reply()
    assert (ids(reply), reply.carried["running"]) == (["p0"], 3)
    w.step(6)
    assert w.sample("run", "p1").state is State.FINISHED
    w.open("run", {"new": (3, 1, -3)}, quota=2, ahead=2, after_quota="continue")
    forwards = w.engine.forwards
    second = w.reply()
    assert ids(second) == ["p1", "new"]
    assert second.stats["ahead"]["tokens_generated"] > 0
    assert second.stats["resumed_kept"] + second.stats["resumed_recomputed"] == 0
    assert w.sample("run", "p2").length > 6
    assert w.engine.forwards > forwards
    assert [s.kv for s in w.sample("run", "p2").closed_spans()] == ["fresh"]


def test_a_new_round_with_suspend_ends_the_running_ahead(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(2, 40), quota=1, after_quota="continue")
    w.reply()
    w.open("run", {"new": (3, 1, -2)}, quota=1)
    assert ids(w.reply()) == ["new"]
    forwards = w.engine.forwards
    w.step(5)
    assert w.engine.forwards == forwards
    assert w.sample("run", "p1").state is State.SUSPENDED


@pytest.mark.parametrize("ahead", [1, 2])
def test_running_ahead_stops_at_the_limit_of_waiting_quotas(harness: Build, ahead: int) -> None:
    """In the step that finishes the last group of `ahead` quotas; new groups start until then."""
    w = harness(slots=3)
    w.open("run", lengths(*[3] * 12), quota=2, ahead=ahead, after_quota="continue")
    w.reply()
    w.step(40)
    assert w.ledger.runs["run"].whole >= 2 * ahead
    assert w.ledger.runs["run"].whole <= 2 * ahead + 3
    assert not w.ledger.runs["run"].running
    w.open("run", {}, quota=2, ahead=ahead, after_quota="continue")
    assert len(w.replies[-1].deliver) == 2
    w.step(5)
    assert w.ledger.runs["run"].running or w.ledger.runs["run"].whole >= 2 * ahead


def test_running_ahead_stops_at_the_staleness_bound(harness: Build) -> None:
    """A push brings a group to the bound; the run generates nothing until its next round."""
    w = harness()
    w.open("run", lengths(2, 40, 40), quota=1, max_staleness=2, after_quota="continue")
    w.reply()
    for moves in (True, False):
        assert (w.push_begin(), w.push_end()) == (200, 200)
        before = w.drawn("run", "p1")
        w.step(4)
        assert (w.drawn("run", "p1") > before) is moves
    w.open("run", {}, quota=1, max_staleness=2)
    assert ids(w.reply()) == ["p1", "p2"]


def test_strict_on_policy_never_runs_ahead(harness: Build) -> None:
    """`max_staleness: 0`: nothing is carried with tokens."""
    w = harness()
    w.open("run", lengths(2, 2, 40), quota=2, max_staleness=0, after_quota="continue")
    w.reply()
    forwards = w.engine.forwards
    w.step(5)
    assert w.engine.forwards == forwards


def test_a_push_suspends_running_ahead_and_resumes_at_the_new_version(harness: Build) -> None:
    """With begin and end, and as a weight call without them."""
    w = harness()
    w.open("run", lengths(2, 60), quota=1, after_quota="continue")
    w.reply()
    w.step(3)
    assert w.push_begin() == 200
    assert w.sample("run", "p1").state is State.SUSPENDED
    forwards = w.engine.forwards
    w.step(3)
    assert w.engine.forwards == forwards
    assert w.push_end() == 200
    w.step(5)
    w.do(lambda e: e.weight_call(ok=True, whole=True, flush=False))
    w.step(5)
    assert w.sample("run", "p1").state is State.RUNNING
    spans = w.sample("run", "p1").closed_spans(w.drawn("run", "p1"))
    assert [(s.version, s.kv) for s in spans] == [(0, "fresh"), (1, "kept"), (2, "kept")]


def test_a_pause_freezes_running_ahead_and_an_abort_does_not_touch_it(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(2, 60), quota=1, after_quota="continue")
    w.reply()
    w.freeze(True)
    before = w.drawn("run", "p1")
    w.step(4)
    assert w.drawn("run", "p1") == before
    w.freeze(False)
    w.do(lambda e: e.controller.abort_everything())
    w.step(4)
    assert w.drawn("run", "p1") > before


def test_a_memory_release_suspends_running_ahead(harness: Build) -> None:
    """The release moves all pages out; running ahead continues after the resume."""
    w = harness()
    w.open("run", lengths(2, 60), quota=1, after_quota="continue")
    w.reply()
    assert w.do(lambda e: e.release_memory())
    w.step(3)
    assert w.sample("run", "p1").state is State.SUSPENDED
    w.do(lambda e: e.released.clear())
    w.step(4)
    assert w.sample("run", "p1").state is State.RUNNING


def test_a_stopped_round_continues_too_and_a_drop_ends_it(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(60, 60), quota=2, after_quota="continue")
    w.step(3)
    w.stop("run")
    w.step(3)
    assert w.ledger.runs["run"].running == 2
    w.drop("run")
    w.step(2)
    assert w.engine.fully_idle()
    assert not w.controller.context.ahead


def test_an_open_round_of_another_run_gets_free_slots_first(harness: Build) -> None:
    """Running ahead gets the slots that open rounds leave."""
    w = harness(slots=2)
    w.open("ahead", lengths(2, 9, 9, 9), quota=1, ahead=3, after_quota="continue")
    w.reply("ahead")
    w.open("open", lengths(30, 30), quota=2)
    w.step(20)
    assert w.ledger.runs["open"].running == 2
    assert w.ledger.runs["ahead"].running == 0


def test_a_smaller_concurrency_suspends_the_newest(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(2, 60, 60, 60), quota=1, after_quota="continue")
    w.reply()
    w.step(2)
    w.open("run", {}, quota=1, concurrency=1)
    assert [w.sample("run", f"p{i}").state for i in (1, 2, 3)] == [State.RUNNING, State.SUSPENDED, State.SUSPENDED]


# --- cohorts


def test_a_cohort_finishes_before_the_round_ends(harness: Build) -> None:
    """Groups that first ran in the last round are delivered first, even if others finish before them."""
    w = harness()
    w.open("run", lengths(2, 20, 25), quota=1, quota_mode="cohort")
    assert ids(w.reply()) == ["p0"]
    w.open("run", {"fast": (3, 1, -2), "slow": (3, 1, -60)}, quota=1, quota_mode="cohort")
    second = w.reply()
    assert (ids(second), second.end_reason) == (["p1", "p2"], "quota")
    assert second.stats["prolonged"]
    w.open("run", {}, quota=1, quota_mode="cohort")
    assert set(ids(w.reply())) == {"fast", "slow"}


def test_a_cohort_of_two_rounds_waits_a_round_longer(harness: Build) -> None:
    w = harness()
    spec = {"quota": 1, "quota_mode": "cohort", "cohort_rounds": 2}
    w.open("run", lengths(2, 40), **spec)
    assert ids(w.reply()) == ["p0"]
    w.open("run", {"q": (3, 1, -2)}, **spec)
    assert ids(w.reply()) == ["q"]
    w.open("run", {"r": (3, 1, -2)}, **spec)
    assert ids(w.reply()) == ["p1"]


def test_a_group_that_never_ran_is_in_no_cohort(harness: Build) -> None:
    """The first forward counts, not the arrival."""
    w = harness(slots=1)
    w.open("run", lengths(2, 30), quota=1, quota_mode="cohort")
    w.reply()
    w.open("run", {}, quota=None, quota_mode="cohort")
    assert not w.controller.context.rounds["run"].cohort
    w.stop("run")


def test_groups_that_ran_ahead_belong_to_the_next_round_s_cohort(harness: Build) -> None:
    w = harness(slots=1)
    w.open("run", lengths(2, 60), quota=1, after_quota="continue")
    w.reply()
    w.step(5)
    w.open("run", {}, quota=None, quota_mode="cohort")
    assert not w.controller.context.rounds["run"].cohort
    w.stop("run")
    w.open("run", {}, quota=None, quota_mode="cohort")
    assert [g.id for g in w.controller.context.rounds["run"].cohort] == ["p1"]
    w.stop("run")


def test_a_stop_overrides_the_cohort(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(2, 60), quota=1, quota_mode="cohort")
    w.reply()
    w.open("run", {}, quota=1, quota_mode="cohort")
    w.step(3)
    w.stop("run")
    assert (w.replies[-1].end_reason, ids(w.replies[-1])) == ("stopped", [])


def test_tokens_count_for_the_round_in_which_they_were_drawn(harness: Build) -> None:
    """Those of the run that runs ahead belong to it up to the moment in which the next round opens."""
    w = harness()
    w.open("run", lengths(2, 60), quota=1, after_quota="continue")
    first = w.reply()
    w.step(5)
    drawn = w.drawn("run", "p1") - first.carried["tokens"]
    assert w.sample("run", "p1").length < w.drawn("run", "p1"), "all are counted already"
    w.open("run", {}, quota=1)
    assert w.reply().stats["ahead"]["tokens_generated"] == drawn


def test_a_report_has_all_tokens(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(60), quota=None)
    w.step(8)
    assert w.sample("run", "p0").length < w.drawn("run", "p0"), "all are counted already"
    assert w.command(messages.GetState).data["runs"]["run"]["tokens"] == w.drawn("run", "p0")


@pytest.mark.parametrize("even", [False, True])
def test_samples_are_counted_beside_any_prefills(harness: Build, even: bool) -> None:
    w = harness(slots=4)
    w.open("run", {"p0": (3, 1, -100)}, quota=None)
    w.step(4 + even)
    lags = []
    for i in range(30):
        w.do(lambda e, i=i: e.add_foreign_request(f"stock{i}", i, 4, 1))
        w.step(2)
        lags.append(w.drawn("run", "p0") - w.sample("run", "p0").length)
    assert max(lags) <= COUNT_EVERY
