"""Trajectories and their rounds in memory: which legs run when, what counts, and what a reply contains."""

import numpy as np
import pytest

from sglang_april.api import messages
from tests.unit.leg_harness import PROMPT, LegHarness


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def w(request: pytest.FixtureRequest) -> LegHarness:
    return LegHarness(overlap=request.param, slots=4)


def test_without_rounds_legs_run_at_once(w: LegHarness) -> None:
    w.leg("run", "a", PROMPT, 4, "t")
    w.step(8)
    first = w.ended("a")
    assert first is not None
    assert (first.number, first.parent, first.shared, first.prefilled) == (0, None, 0, 3)
    w.leg("run", "b", [*w.sequence("a"), 1], 2, "t")
    w.step(8)
    second = w.ended("b")
    assert second is not None
    assert (second.number, second.parent, second.shared) == (1, 0, 7)
    assert np.frombuffer(second.prompt_ids, "<i4").tolist() == [1]
    w.leg("run", "c", [*w.sequence("a")[:5], 2, 2], 2, "t")
    w.step(8)
    third = w.ended("c")
    assert third is not None
    assert (third.parent, third.shared) == (0, 5)
    assert [leg.mismatch for leg in (first, second, third)] == [False, False, True]
    (trajectory,) = w.context.trajectories["run"].active.values()
    assert (trajectory.legs, trajectory.mismatches, len(trajectory.sequences)) == (3, 1, 2)


def test_the_state_of_a_trajectory_has_all_tokens(w: LegHarness) -> None:
    w.leg("run", "a", PROMPT, 60, "t")
    w.step(8)
    (sample,) = w.context.trajectories["run"].active["t"].pending
    drawn = w.context.engine.output_length(sample)
    assert sample.length < drawn, "all are counted already"
    assert w.command(messages.GetTrajectory, run="run", id="t").data["tokens"] == drawn


def test_the_round_ends_in_the_step_in_which_its_quota_is_done(w: LegHarness) -> None:
    assert w.open("run", 2).status == 200
    for name in "abc":
        w.leg("run", name, PROMPT, 20, name)
    w.step(3)
    assert w.running() == {"a", "b", "c"}
    assert w.done("run", "a").data["counted"] == 1
    forwards = w.engine.forwards
    w.done("run", "b")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.end_reason, reply.trajectories) == ("quota", ["a", "b"])
    assert [(t["id"], t["state"]) for t in reply.carried["trajectories"]] == [("c", "pending")]
    w.step(5)
    assert w.engine.forwards == forwards
    assert not w.running()
    w.leg("run", "d", PROMPT, 2, "d")
    w.step(3)
    assert not w.running()
    w.open("run", 2)
    w.step(40)
    assert w.ended("c") is not None
    assert w.ended("d") is not None
    w.done("run", "d", "c")
    assert w.of(messages.RoundEnded)[1].trajectories == ["d", "c"]


def test_a_repeated_or_wrong_message_changes_nothing(w: LegHarness) -> None:
    w.open("run", 3)
    for name in "abc":
        w.leg("run", name, PROMPT, 2, name)
    w.step(10)
    assert w.done("run", "a", reject=("b",)).status == 200
    assert w.done("run", "a", reject=("b",)).data["new"] == {}
    assert w.done("run", "b").status == w.done("run", reject=("a",)).status == 409
    assert w.done("run", "c", "x").status == 404
    assert w.done("run", "c").data == {
        "done": 1,
        "rejected": 0,
        "new": {"c": "c"},
        "round_id": "r0",
        "counted": 2,
        "quota": 3,
    }
    assert not w.leg("run", "late", PROMPT, 2, "b"), "a leg of an ended trajectory"
    w.stop("run")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.trajectories, reply.rejected) == (["a", "c"], ["b"])
    assert w.done("run", "a", "c").status == 200


def test_a_request_that_arrives_after_its_trajectory_was_rejected_is_refused(w: LegHarness) -> None:
    """An agent can fail while its first request is on its way. A trajectory that it began would have no owner, and the
    round would wait for it for ever."""
    w.open("run", 1, max_staleness=0)
    assert w.done("run", "t").status == 404
    assert w.done("run", reject=("t",)).data["rejected"] == 1
    assert not w.leg("run", "a", PROMPT, 2, "t")
    assert w.done("run", reject=("t",)).status == 200
    assert w.done("run", "t").status == 409
    w.stop("run")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.rejected, reply.carried["trajectories"]) == ([], [])


def test_a_message_to_an_unknown_run_leaves_nothing(w: LegHarness) -> None:
    assert w.done("run", "t").status == w.done("run", reject=("t",)).status == 404
    assert not w.context.trajectories


def test_the_memory_of_ended_trajectories_is_bounded(w: LegHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_april.scheduler.trajectory_run.MAX_ENDED", 3)
    w.open("run", None)
    for i in range(5):
        w.leg("run", f"r{i}", PROMPT, 2, f"t{i}")
    w.command(messages.Drop, run="run")
    assert list(w.context.trajectories["run"].ended) == ["t2", "t3", "t4"]
    for i in range(5):
        w.done("run", reject=(f"u{i}",))
    assert list(w.context.trajectories["run"].ended) == ["u2", "u3", "u4"]


def test_done_aborts_what_is_pending(w: LegHarness) -> None:
    w.open("run", 2)
    w.leg("run", "a", PROMPT, 30, "a")
    w.step(6)
    w.done("run", "a")
    leg = w.ended("a")
    assert leg is not None
    assert leg.result.finish_reason == {"type": "abort"}
    assert 0 < len(leg.result.output_ids) // 4 < 30
    assert not w.running()


def test_concurrency_and_begun_trajectories(w: LegHarness) -> None:
    w.open("run", 9, concurrency=1)
    w.leg("run", "a", PROMPT, 3, "t")
    w.leg("run", "x", PROMPT, 3, "x")
    w.leg("run", "y", PROMPT, 3, "y")
    while w.ended("a") is None:
        w.step()
        assert len(w.running()) <= 1
    w.leg("run", "b", w.sequence("a"), 3, "t")
    while w.ended("y") is None:
        w.step()
        assert len(w.running()) <= 1
    order = [leg.rid for leg in w.of(messages.LegEnded)]
    assert order.index("b") < order.index("y"), "a begun trajectory comes before a new one"


def test_groups_count_when_n_are_done(w: LegHarness) -> None:
    w.open("run", 1, quota_unit="group", n=2)
    for name in ("g0", "g1", "g2", "h0"):
        w.leg("run", name, PROMPT, 2, name, name[0])
    assert not w.leg("run", "late", PROMPT, 2, "g0", "h"), "another group"
    w.step(10)
    assert w.done("run", "h0", "g1").data["counted"] == 0
    w.done("run", "g0")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.trajectories, reply.rejected) == (["g1", "g0"], ["g2"])
    assert [t["id"] for t in reply.carried["trajectories"]] == ["h0"]


def test_a_stale_trajectory_is_waited_for(w: LegHarness) -> None:
    w.leg("run", "old", PROMPT, 2, "old")
    w.step(5)
    w.push()
    w.open("run", 1, max_staleness=1)
    w.leg("run", "new", PROMPT, 2, "new")
    w.step(5)
    w.done("run", "new")
    assert not w.of(messages.RoundEnded)
    w.done("run", "old")
    assert w.of(messages.RoundEnded)[0].trajectories == ["old"]


def test_running_ahead_until_a_quota_waits(w: LegHarness) -> None:
    w.open("run", 1, after_quota="continue")
    for name in "abc":
        w.leg("run", name, PROMPT, 30, name)
    w.step(3)
    w.done("run", "a")
    assert w.of(messages.RoundEnded)
    w.step(2)
    assert w.running() == {"b", "c"}
    w.done("run", "b")
    w.step(2)
    assert not w.running()
    w.open("run", 1)
    assert w.of(messages.RoundEnded)[1].trajectories == ["b"]


def test_a_push_and_a_pause_suspend_legs_of_a_round(w: LegHarness) -> None:
    w.open("run", 1)
    w.leg("run", "a", PROMPT, 12, "a")
    w.step(4)
    w.command(messages.PushBegin)
    w.leg("run", "b", PROMPT, 2, "b")
    forwards = w.engine.forwards
    w.step(4)
    assert w.engine.forwards == forwards
    w.command(messages.PushEnd)
    w.step(20)
    leg = w.ended("a")
    assert leg is not None
    assert [(s.version, s.kv) for s in leg.result.spans] == [(0, "fresh"), (1, "kept")]
    assert w.ended("b") is not None


def test_strict_on_policy_begins_only_groups_that_the_quota_needs(w: LegHarness) -> None:
    w.open("run", 1, quota_unit="group", n=2, max_staleness=0)
    for name in ("g0", "h0", "g1", "h1", "g2"):
        w.leg("run", name, PROMPT, 2, name, name[0])
    w.step(12)
    assert [w.ended(name) is not None for name in ("g0", "h0", "g1", "h1", "g2")] == [True, False, True, False, False]
    w.done("run", "g0", "g1")
    assert w.of(messages.RoundEnded)[0].trajectories == ["g0", "g1"]


def test_a_request_that_the_engine_refuses_is_no_leg(w: LegHarness) -> None:
    """SGLang draws one token of another prompt for it, and answers 400."""
    w.leg("run", "a", PROMPT, 3, "t")
    w.step(8)
    history = [*w.sequence("a"), 1]
    w.leg("run", "bad", history, 1, "t")
    for engine in w.engines:
        (sample,) = next(iter(engine.controller.context.trajectories["run"].active.values())).pending
        sample.request.refused = True
    w.step(6)
    assert w.ended("bad") is None
    assert [request.rid for request in w.answered()] == ["a", "bad"]
    (trajectory,) = w.context.trajectories["run"].active.values()
    assert (trajectory.tokens, trajectory.mismatches, len(trajectory.sequences)) == (3, 0, 1)
    w.leg("run", "b", history, 2, "t")
    w.step(8)
    again = w.ended("b")
    assert again is not None
    assert (again.parent, again.shared, again.mismatch) == (0, len(history) - 1, False)


def test_a_request_that_the_engine_refuses_begins_no_trajectory(w: LegHarness) -> None:
    w.leg("run", "bad", PROMPT, 1, "t")
    for engine in w.engines:
        (trajectory,) = engine.controller.context.trajectories["run"].active.values()
        (sample,) = trajectory.pending
        sample.request.refused = True
    w.step(6)
    (trajectory,) = w.context.trajectories["run"].active.values()
    assert trajectory.oldest is None


def test_a_round_that_has_waited_long_enough(w: LegHarness) -> None:
    w.leg("run", "old", PROMPT, 2, "old")
    w.step(5)
    w.push()
    w.open("run", 1, max_staleness=1, wait_s=3.0)
    w.leg("run", "new", PROMPT, 2, "new")
    w.step(5)
    w.command(messages.StopRound, round_id="r2", waited=True)
    assert not w.of(messages.RoundEnded), "its quota is not met"
    w.done("run", "new")
    assert [event.round_id for event in w.of(messages.RoundWaits)] == ["r2"]
    w.command(messages.StopRound, round_id="r2", waited=True)
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.end_reason, reply.trajectories) == ("waited", ["new"])
    assert [(t["id"], t["mandatory"]) for t in reply.carried["trajectories"]] == [("old", True)]


def test_an_extension_ends_a_wait(w: LegHarness) -> None:
    w.leg("run", "old", PROMPT, 2, "old")
    w.step(5)
    w.push()
    w.open("run", 1, max_staleness=1, wait_s=3.0)
    for name in ("new", "newer"):
        w.leg("run", name, PROMPT, 2, name)
    w.step(8)
    w.done("run", "new")
    w.command(messages.ExtendRound, round_id="r2", quota_add=1, prompts=[], params=[])
    assert len(w.of(messages.RoundWaits)) == 1
    w.done("run", "newer")
    assert len(w.of(messages.RoundWaits)) == 2


def test_legs_that_added_no_token_are_continued_in_order(w: LegHarness) -> None:
    """A client that repeats a request and aborts it each time: no branch begins."""
    w.leg("run", "0", PROMPT, 2, "t")
    w.step(5)
    ids = [*w.sequence("0"), 1]
    for rid in ("1", "2"):
        w.leg("run", rid, ids, 3, "t")
        w.abort(rid)
    w.leg("run", "3", ids, 3, "t")
    w.step(6)
    legs = [w.ended(rid) for rid in "0123"]
    assert [leg and leg.parent for leg in legs] == [None, 0, 1, 2]
    assert [leg and leg.mismatch for leg in legs] == [False] * 4
