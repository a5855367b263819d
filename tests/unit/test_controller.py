"""The controller on the fake engine: when rounds end, what they deliver, staleness, ids."""

import pytest

from sglang_april.api import messages
from sglang_april.scheduler import report
from sglang_april.scheduler.state import State, sample_seed
from tests.unit.controller_harness import Build, ControllerHarness, given_as, ids, lengths

# --- when a round ends, and what it delivers


def test_the_round_ends_in_the_step_that_meets_the_quota(harness: Build) -> None:
    """No forward follows; unfinished samples are suspended with their KV."""
    w = harness()
    w.open("run", lengths(2, 4, 9, 9), quota=2)
    reply = w.reply()
    assert (reply.end_reason, ids(reply)) == ("quota", ["p0", "p1"])
    drained = int(w.engine.overlap)
    assert [w.sample("run", name).length for name in ("p2", "p3")] == [4 + drained] * 2
    assert (reply.carried["groups"], reply.carried["samples"], reply.carried["tokens"]) == (2, 2, 2 * (4 + drained))
    assert reply.carried["tokens_by_tier"] == {"device": 2 * (3 + 3 + drained), "host": 0, "disk": 0, "none": 0}
    assert reply.stats["tokens_after_quota"] == 2 * drained
    forwards = w.engine.forwards
    w.step(5)
    assert w.engine.forwards == forwards


def test_finishes_of_the_step_in_flight_are_carried_and_delivered_first() -> None:
    """If they meet the next quota, that round ends without a forward."""
    w = ControllerHarness(overlap=True)
    w.open("run", lengths(2, 3, 9), quota=1)
    assert ids(w.reply()) == ["p0"]
    assert w.sample("run", "p1").state is State.FINISHED
    forwards = w.engine.forwards
    w.open("run", {"new": (3, 1, -1)}, quota=1)
    assert ids(w.replies[-1]) == ["p1"]
    assert w.engine.forwards == forwards


def test_surplus_of_one_step_is_carried_or_returned(harness: Build) -> None:
    """Exactly the quota in admission order; the next round delivers the surplus first, `surplus: return` at once."""
    w = harness()
    w.open("run", lengths(3, 3, 3, 9), quota=2)
    assert ids(w.reply()) == ["p0", "p1"]
    w.open("run", {"late": (3, 1, -2)}, quota=2)
    assert ids(w.reply()) == ["p2", "late"]
    w.open("other", lengths(3, 3, 3, 9), quota=2, surplus="return")
    assert ids(w.reply("other")) == ["p0", "p1", "p2"]


def test_no_part_of_an_unfinished_group_is_delivered(harness: Build) -> None:
    """With unit `group`, finished members wait for the others."""
    w = harness()
    ends = [1 + sample_seed(0, "p", 0, i) % 20 for i in range(3)]
    w.open("run", {"p": (3, 3, 20), "q": (3, 1, -min(ends) - 2)}, quota=1)
    assert min(ends) + 4 < max(ends)
    assert ids(w.reply()) == ["q"]
    assert State.FINISHED in {w.sample("run", "p", i).state for i in range(3)}
    w.drain()
    assert [(d.id, d.complete, d.indices) for d in w.replies[-1].deliver] == [("p", True, [0, 1, 2])]
    assert [len(w.samples[("run", "p", 0), i].output_ids) // 4 for i in range(3)] == ends


def test_unit_sample_delivers_the_rest_of_a_group_under_the_same_id(harness: Build) -> None:
    """`complete` is false until the last member is delivered."""
    w = harness()
    w.open("run", {"p": (3, 4, 20)}, quota=1, quota_unit="sample", surplus="return")
    assert [d.complete for d in w.reply().deliver] == [False]
    w.drain()
    parts = [d for r in w.replies for d in r.deliver]
    assert sorted(i for d in parts for i in d.indices) == [0, 1, 2, 3]
    assert [d.complete for d in parts] == [False] * (len(parts) - 1) + [True]
    assert {(d.id, d.incarnation) for d in parts} == {("p", 0)}


@pytest.mark.parametrize(("quota", "reason"), [(None, "exhausted"), (7, "exhausted"), (3, "quota")])
def test_a_round_ends_when_everything_has_finished(harness: Build, quota: int | None, reason: str) -> None:
    """`quota: null`, and a quota larger than what can finish."""
    w = harness()
    w.open("run", lengths(1, 5, 9), quota=quota)
    reply = w.reply()
    assert (reply.end_reason, ids(reply)) == (reason, ["p0", "p1", "p2"])


def test_an_empty_round_ends_at_once(harness: Build) -> None:
    """No prompts and no carry: `exhausted`, also under a pause, which has no steps."""
    w = harness()
    w.freeze(True)
    w.open("run", {}, quota=3)
    assert (w.replies[-1].end_reason, w.replies[-1].deliver) == ("exhausted", [])


def test_stop_delivers_finished_groups_or_those_named(harness: Build) -> None:
    """The rest is carried; a second stop changes nothing."""
    w = harness()
    w.open("run", lengths(1, 1, 1, 9), quota=None)
    w.step(3)
    w.stop("run", ["p2", "p3", "unknown"])
    assert (w.replies[-1].end_reason, ids(w.replies[-1])) == ("stopped", ["p2"])
    w.open("run", {}, quota=None)
    w.stop("run")
    assert ids(w.replies[-1]) == ["p0", "p1"]
    assert not w.command(messages.StopRound, round_id=w.replies[-1].round_id).data["open"]
    assert w.sample("run", "p3").state is State.SUSPENDED


@pytest.mark.parametrize("place", ["queue", "batch"])
def test_a_sample_aborted_by_the_engine_is_delivered_and_counts(harness: Build, place: str) -> None:
    """With the engine's `finish_reason` and the tokens so far."""
    w = harness(chunk=16)
    w.open("run", {"p": (20, 1, -20), "q": (20, 1, -20)}, quota=1)
    w.step(1 if place == "queue" else 5)
    if place == "queue":
        assert [r.sample.group.id for r in w.engine.waiting] == ["q"]
        w.do(lambda e: e.abort_waiting(e.waiting[0]))
    else:
        w.do(lambda e: setattr(e.running[1], "abort_next", True))
    assert ids(w.reply()) == ["q"]
    sample = w.samples[("run", "q", 0), 0]
    assert sample.finish_reason == {"type": "abort"}
    assert len(sample.output_ids) // 4 == (0 if place == "queue" else sample.spans[0].end)


def test_an_abort_at_admission_ends_the_round_before_the_forward() -> None:
    """What the engine aborts in its queue is finished, and meets the quota."""
    w = ControllerHarness(queue_limit=1, slots=4)
    w.open("run", lengths(9, 9, 9), quota=2)
    w.step()
    assert (w.replies[-1].end_reason, w.engine.forwards) == ("quota", 0)
    assert ids(w.replies[-1]) == ["p1", "p2"]


def test_a_drop_can_end_a_round_and_deletes_nothing_else(harness: Build) -> None:
    """Dropped samples are deleted from any state."""
    w = harness(slots=2)
    w.open("run", lengths(1, 9, 9, 9), quota=None)
    w.step(4)
    assert {w.sample("run", name).state for name in ("p1", "p2", "p3")} == {State.RUNNING, State.QUEUED}
    w.drop("run", ["p1", "p3", "unknown"])
    assert not w.replies
    w.drop("run", ["p2"])
    assert (w.replies[-1].end_reason, ids(w.replies[-1])) == ("exhausted", ["p0"])
    w.drop("unknown")


def test_the_step_in_flight_can_meet_the_quota_before_a_drop() -> None:
    """Samples that finished before the drop belong to the round."""
    w = ControllerHarness(overlap=True)
    w.open("run", lengths(1, 9), quota=1)
    w.step()
    assert w.engine.in_flight
    w.drop("run")
    assert (w.replies[-1].end_reason, ids(w.replies[-1])) == ("quota", ["p0"])
    assert w.replies[-1].stats["tokens_after_quota"] <= 1


# --- staleness


def test_a_stale_group_must_finish_and_the_batch_stays_full_meanwhile(harness: Build) -> None:
    """The round waits for it while new groups start, and delivers it first."""
    w = harness(slots=2)
    w.open("run", lengths(1, 30), quota=1, max_staleness=2)
    w.reply()
    for _ in range(2):
        assert (w.push_begin(), w.push_end()) == (200, 200)
    w.open("run", {f"n{i}": (3, 1, -3) for i in range(5)}, quota=1, max_staleness=2)
    assert [r["mandatory"] for r in report.state(w.controller.context)["rounds"]] == [["p1"]]
    reply = w.reply()
    assert (ids(reply), reply.stats["over_bound"]) == (["p1"], 0)
    assert w.ledger.runs["run"].finished == 5


def test_a_push_inside_a_round_makes_groups_mandatory(harness: Build) -> None:
    """All members of a group that reaches the bound, unstarted ones too, finish in this round."""
    w = harness(slots=2)
    w.open("run", {"old": (3, 3, -8), "a": (3, 1, -1), "b": (3, 1, -1)}, quota=1, max_staleness=1)
    w.step(3)
    assert w.sample("run", "old", 2).state is State.QUEUED
    assert (w.push_begin(), w.push_end()) == (200, 200)
    assert [(d.id, d.indices) for d in w.reply().deliver] == [("old", [0, 1, 2])]


def test_a_group_beyond_the_bound_is_delivered_and_counted(harness: Build) -> None:
    """Several pushes between two rounds, or a stop, carry a group over the bound; nothing is dropped."""
    w = harness()
    w.open("run", lengths(1, 9), quota=1, max_staleness=1)
    w.reply()
    for _ in range(2):
        assert (w.push_begin(), w.push_end()) == (200, 200)
    w.open("run", {}, quota=1, max_staleness=1)
    w.step(2)
    w.stop("run")
    assert w.replies[-1].carried["oldest_staleness"] == 2
    w.open("run", {}, quota=1, max_staleness=1)
    reply = w.reply()
    assert (ids(reply), reply.stats["over_bound"]) == (["p1"], 1)


def test_finished_surplus_ages_too(harness: Build) -> None:
    """A finished group that reaches the bound is delivered beyond the quota."""
    w = harness()
    w.open("run", lengths(2, 2, 2), quota=1, max_staleness=1)
    assert ids(w.reply()) == ["p0"]
    assert (w.push_begin(), w.push_end()) == (200, 200)
    w.open("run", {"new": (3, 1, -1)}, quota=1, max_staleness=1)
    assert ids(w.reply()) == ["p1", "p2"]


@pytest.mark.parametrize(("unit", "started"), [("group", 3), ("sample", 2)])
def test_strict_on_policy_starts_what_the_quota_needs(harness: Build, unit: str, started: int) -> None:
    """`max_staleness: 0`: no more groups start than the quota needs, none is carried with tokens."""
    w = harness()
    w.open("run", {f"p{i}": (3, 2, -3 - i) for i in range(5)}, quota=3, quota_unit=unit, max_staleness=0)
    reply = w.reply()
    assert ids(reply) == [f"p{i}" for i in range(started)]
    assert reply.stats["started"] == 2 * started
    assert (reply.carried["tokens"], reply.carried["groups"]) == (0, 5 - started)


def test_strict_on_policy_with_more_partials_than_the_quota(harness: Build) -> None:
    """`max_staleness: 0`: carried partials finish in this round, and nothing new starts."""
    w = harness()
    w.open("run", lengths(1, 9, 9, 9), quota=1)
    w.reply()
    w.open("run", {"new": (3, 1, -1), "newer": (3, 1, -1)}, quota=1, max_staleness=0)
    reply = w.reply()
    assert ids(reply) == ["p1", "p2", "p3"]
    assert (reply.stats["started"], w.sample("run", "new").state) == (0, State.QUEUED)


def test_groups_that_have_not_begun_are_named(harness: Build) -> None:
    """`GET /april/partials`: exactly the groups that can be dropped without losing a token."""
    w = harness()
    w.open("run", {f"p{i}": (3, 2, 1 + 8 * i) for i in range(8)}, quota=1)
    w.reply()
    listed = w.command(messages.GetPartials, run="run").data
    begun = {partial["id"] for partial in listed["partials"]}
    unstarted = {group["id"] for group in listed["unstarted"]}
    assert begun
    assert unstarted
    assert begun | unstarted == {f"p{i}" for i in range(1, 8)}
    assert not begun & unstarted


# --- ids


def test_an_id_is_taken_until_its_group_is_delivered_or_dropped(harness: Build) -> None:
    """409 refuses the whole request; afterwards the id gets a new incarnation with another seed."""
    w = harness()
    w.open("run", lengths(1, 9), quota=1)
    w.reply()
    assert w.open("run", lengths(9, 9), quota=1).status == 409
    assert list(w.ledger.runs["run"].groups) == ["p1"]
    seed = w.sample("run", "p1").seed
    w.drop("run")
    assert w.open("run", lengths(9, 9), quota=1).data["incarnations"] == [1, 1]
    assert w.sample("run", "p1").seed != seed
    assert w.open("run", {"p5": (1, 1, 1)}).status == 409


# --- the carry


def test_too_much_carry_refuses_new_prompts_and_drops_nothing(harness: Build) -> None:
    """A round without prompts is served, because it only reduces what waits."""
    w = harness()
    for engine in w.engines:
        engine.controller.context.carry_cap_tokens = 20
    w.open("run", lengths(4, 60, 60), quota=1)
    w.reply()
    w.open("run", {}, quota=None)
    while w.drawn("run", "p1") + w.drawn("run", "p2") < 20:
        w.step()
    prompts, params = given_as(lengths(1))
    spec = messages.RoundSpec("other", "other", 1, "group", "keep", 5)
    extend = {"round_id": w.rounds["run"].spec.round_id, "quota_add": 0, "prompts": prompts, "params": params}
    for refused in (
        w.command(messages.OpenRound, spec=spec, prompts=prompts, params=params),
        w.command(messages.ExtendRound, **extend),
    ):
        assert (refused.status, refused.field) == (503, "prompts")
        assert "--april-carry-tokens 20 is reached" in refused.reason
    assert ids(w.reply()) == ["p1", "p2"]
    assert w.command(messages.GetState).data["carry_tokens"] == 0
    assert w.open("run", lengths(1)).status == 200
