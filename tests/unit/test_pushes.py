"""The controller on the fake engine: pushes."""

import pytest

from sglang_april.scheduler.state import State
from tests.unit.controller_harness import Build, ids, lengths, spans


def test_a_push_of_ten_buckets_suspends_samples_and_moves_the_version_once(harness: Build) -> None:
    """The round stays open and continues at the new version on kept KV."""
    w = harness()
    w.open("run", lengths(9, 9), quota=2)
    w.step(3)
    assert w.push_begin(version=7) == 200
    forwards = w.engine.forwards
    for _ in range(10):
        w.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
        w.step()
    assert (w.engine.forwards, w.version) == (forwards, 0)
    assert w.open("other", lengths(1)).status == 503
    assert w.push_end() == 200
    assert w.version == 7
    reply = w.reply()
    assert (ids(reply), reply.policy_version, reply.stats["pushes"]) == (["p0", "p1"], 7, 1)
    assert spans(w, "p0") == [(0, "fresh"), (7, "kept")]


def test_weight_calls_without_begin_are_one_push_until_the_next_forward(harness: Build) -> None:
    """The version moves at the first accepted call after any forward, including stock requests'."""
    w = harness()
    w.do(lambda e: e.weight_call(ok=True, whole=False, flush=True))
    w.do(lambda e: e.weight_call(ok=True, whole=False, flush=True))
    assert w.version == 1
    w.do(lambda e: e.add_foreign_request("s", 0, 3, 1))
    w.step(4)
    w.do(lambda e: e.weight_call(ok=True, whole=False, flush=True))
    assert w.version == 2


def test_weight_calls_in_sglangs_own_bracket_are_one_push(harness: Build) -> None:
    """No sample takes a step inside, and the version moves once, at its end."""
    w = harness()
    w.open("run", lengths(9, 9), quota=2)
    w.step(3)
    w.do(lambda e: e.controller.session_begun())
    for _ in range(3):
        w.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
        w.step()
    assert (w.version, w.controller.context.clock.open) == (0, True)
    w.do(lambda e: e.controller.session_ended())
    assert (w.version, w.controller.context.clock.open) == (1, False)
    assert ids(w.reply()) == ["p0", "p1"]


def test_sglangs_own_bracket_inside_of_a_push_leaves_its_version_alone(harness: Build) -> None:
    w = harness()
    assert w.push_begin(version=7) == 200
    w.do(lambda e: e.controller.session_begun())
    w.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
    w.do(lambda e: e.controller.session_ended())
    assert (w.version, w.controller.context.clock.open) == (0, True)
    assert w.push_end() == 200
    assert w.version == 7


def test_sglangs_own_bracket_with_a_failed_call_does_not_move_the_version(harness: Build) -> None:
    """The next one heals the failure."""
    w = harness()
    problems: list[str] = []
    for ok in (False, True):
        w.do(lambda e: e.controller.session_begun())
        w.do(lambda e, ok=ok: e.weight_call(ok=ok, whole=False, flush=False))
        w.do(lambda e: problems.append(e.controller.session_ended()))
    assert "a weight call of this push failed" in problems[0]
    assert problems[-1] == ""
    assert (w.version, w.controller.context.closed()) == (1, "")


def test_the_begin_and_the_end_of_a_push_leave_no_weight_session_open(harness: Build) -> None:
    """Also the end of a push that has failed."""
    w = harness()
    w.push_begin()
    w.do(lambda e: e.weight_call(ok=False, whole=False, flush=False))
    before = w.engine.sessions_ended
    assert w.push_end() == 409
    assert w.engine.sessions_ended == before + 1
    w.push_begin()
    assert w.engine.sessions_ended == before + 2


def test_a_refused_push_changes_nothing(harness: Build) -> None:
    """409 for a version that is not greater and for an end without a begin; running samples keep running."""
    w = harness()
    w.open("run", lengths(9), quota=1)
    w.step(3)
    assert w.push_begin(version=0) == 409
    assert w.push_end() == 409
    assert w.sample("run", "p0").state is State.RUNNING
    assert not w.controller.context.closed()


def test_begin_again_starts_the_push_over_and_end_may_name_the_version(harness: Build) -> None:
    """Also after a failed call; an end that names a version not greater is 409 and leaves the push open."""
    w = harness()
    assert w.push_begin(version=3) == 200
    w.do(lambda e: e.weight_call(ok=False, whole=False, flush=False))
    assert w.push_end() == 409
    assert w.push_begin() == 200
    assert w.push_end(version=0) == 409
    assert w.push_end(version=4) == 200
    assert w.version == 4


@pytest.mark.parametrize("heal", ["push", "disk"])
def test_a_failed_weight_call_closes_admission_until_a_push_succeeds(harness: Build, heal: str) -> None:
    """No rollout sample steps, rounds get 503 with the reason, and a single bucket does not heal it."""
    w = harness()
    w.open("run", lengths(9), quota=1)
    w.step(3)
    w.do(lambda e: e.weight_call(ok=False, whole=False, flush=False))
    w.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
    w.step(3)
    assert w.sample("run", "p0").state is State.SUSPENDED
    answer = w.open("other", lengths(1))
    assert answer.status == 503
    assert "updated only in part" in answer.reason
    if heal == "push":
        assert (w.push_begin(), w.push_end()) == (200, 200)
    else:
        w.do(lambda e: e.weight_call(ok=True, whole=True, flush=False))
    assert ids(w.reply()) == ["p0"]
    assert spans(w, "p0") == [(0, "fresh"), (1, "kept")]


def test_a_quota_met_just_before_a_push_ends_the_round_under_the_old_version(harness: Build) -> None:
    """The round ended in that step, so the push makes none of its groups mandatory."""
    w = harness()
    w.open("run", lengths(2, 9), quota=1, max_staleness=1)
    while not w.controller.context.rounds["run"].counted():
        w.step()
    assert (w.push_begin(), w.push_end()) == (200, 200)
    assert [(ids(r), r.policy_version) for r in w.replies] == [(["p0"], 0)]


@pytest.mark.parametrize("policy", ["keep", "auto", "recompute"])
def test_only_kv_of_an_older_version_is_recomputed(harness: Build, policy: str) -> None:
    """`recompute` keeps pages of the same version; `auto` without rates keeps."""
    w = harness()
    w.open("run", lengths(1, 20), quota=1, kv=policy)
    w.reply()
    w.open("run", {"q": (3, 1, -2)}, quota=1, kv=policy)
    assert w.reply().stats["resumed_kept"] == 1
    assert (w.push_begin(), w.push_end()) == (200, 200)
    w.open("run", {}, quota=1, kv=policy)
    reply = w.reply()
    again = policy == "recompute"
    assert (reply.stats["resumed_kept"], reply.stats["resumed_recomputed"]) == (1 - again, again)
    assert reply.stats["kv_fallback"] == 0
    assert spans(w, "p1") == [(0, "fresh"), (1, "recomputed" if again else "kept")]
