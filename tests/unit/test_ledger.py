"""The ledger: a sample is in one place, leaves once, and every counter says so; ids and seeds."""

import pytest

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import Span
from sglang_april.scheduler.state import LedgerError, State, sample_seed
from tests.unit.ledger_driver import LedgerDriver, prompt

QUEUED, RUNNING, SUSPENDED, FINISHED = State
ALLOWED = {
    (QUEUED, RUNNING),
    (RUNNING, QUEUED),
    (RUNNING, SUSPENDED),
    (RUNNING, FINISHED),
    (SUSPENDED, RUNNING),
}


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_only_allowed_transitions_change_the_state(before: State, after: State) -> None:
    """A finished sample never comes back, a queued one has no tokens to suspend."""
    hand = LedgerDriver()
    (group,) = hand.groups(1)
    sample = group.samples[0]
    path = {QUEUED: [], RUNNING: [RUNNING], SUSPENDED: [RUNNING, SUSPENDED], FINISHED: [RUNNING, FINISHED]}[before]
    for state in path:
        sample.move(state)
    if (before, after) in ALLOWED:
        sample.move(after)
        assert (sample.state, group.counts[after], group.counts[before]) == (after, 1, 0)
    else:
        with pytest.raises(LedgerError):
            sample.move(after)
        assert (sample.state, group.counts[before]) == (before, 1)


def test_a_suspended_sample_without_a_token_is_queued_again() -> None:
    """Prompts never started stay untouched."""
    hand = LedgerDriver()
    group, _ = hand.groups(2, 1)
    hand.start(*group.samples.values())
    hand.suspend(*group.samples.values())
    assert group.counts[QUEUED] == 2
    assert (group.queue, hand.run.suspended, hand.run.running) == ("new", {}, 0)
    assert [g.id for g in hand.run.new] == ["g0", "g1"]


def test_groups_with_queued_members_are_in_the_admission_queues() -> None:
    """Members of groups already begun come before new groups."""
    hand = LedgerDriver()
    group, other = hand.groups(2, 2)
    hand.start(group.samples[0])
    assert (group.queue, list(hand.run.begun), hand.run.new) == ("begun", [group], [other])
    hand.start(group.samples[1])
    assert (group.queue, list(hand.run.begun)) == ("", [])
    hand.grow(group.samples[0])
    hand.suspend(*group.samples.values())
    assert (group.queue, list(hand.run.begun), list(hand.run.suspended)) == ("begun", [group], [group.samples[0]])


def test_order_is_fixed_at_the_first_admission() -> None:
    """Kept over suspensions, so that a resumed batch has its old order."""
    hand = LedgerDriver()
    a, b = hand.groups(1, 1)
    hand.begin(b.samples[0])
    hand.begin(a.samples[0])
    hand.start(a.samples[0], b.samples[0])
    assert [b.samples[0].order, a.samples[0].order] == [0, 1]


def test_a_group_leaves_with_its_last_sample() -> None:
    """Parts of it first, under the same id and incarnation; nothing can be delivered twice."""
    hand = LedgerDriver()
    (group,) = hand.groups(3)
    hand.finish(group.samples[0], group.samples[2])
    part = hand.ledger.deliver(group, [2, 0])
    assert (part.id, part.incarnation, part.indices, part.complete) == ("g0", 0, [0, 2], False)
    assert (hand.run.finished, hand.run.whole, list(group.samples)) == (0, 0, [1])
    with pytest.raises(LedgerError):
        hand.ledger.deliver(group, [0])
    hand.finish(group.samples[1])
    assert (hand.run.finished, hand.run.whole) == (1, 1)
    assert hand.ledger.deliver(group, [1]).complete
    assert (hand.run.groups, hand.run.finished, hand.run.whole) == ({}, 0, 0)


def test_an_unfinished_sample_cannot_be_delivered() -> None:
    hand = LedgerDriver()
    (group,) = hand.groups(1)
    hand.start(group.samples[0])
    with pytest.raises(LedgerError):
        hand.ledger.deliver(group, [0])


def test_a_drop_deletes_the_named_groups_in_any_state() -> None:
    """The only thing that deletes samples; counters and shelves forget them."""
    hand = LedgerDriver()
    _, begun, partial, done, kept = hand.groups(1, 2, 1, 1, 1)
    hand.start(begun.samples[0])
    hand.begin(partial.samples[0])
    hand.finish(done.samples[0])
    gone = hand.ledger.drop(hand.run, ["g0", "g1", "g2", "g3", "unknown"])
    assert len(gone) == 5
    run = hand.run
    assert (run.running, run.finished, run.whole, run.suspended, run.begun) == (0, 0, 0, {}, {})
    assert (run.new, list(run.groups)) == ([kept], ["g4"])
    assert hand.ledger.census() == {"queued": 1, "running": 0, "suspended": 0, "finished": 0}
    assert hand.ledger.drop(run, None) == [kept.samples[0]]


def test_a_delivered_id_can_be_used_again_as_a_new_incarnation() -> None:
    """The whole request is refused and changes nothing; another run has ids of its own."""
    hand = LedgerDriver()
    (group,) = hand.groups(1)
    with pytest.raises(RequestError) as no:
        hand.accept(prompt("other"), prompt("g0"))
    assert (no.value.status, no.value.field, list(hand.run.groups)) == (409, "prompts[1].id", ["g0"])
    assert LedgerDriver("another", hand.ledger).accept(prompt("g0"))[0].incarnation == 0
    hand.finish(group.samples[0])
    hand.ledger.deliver(group, [0])
    assert [hand.accept(prompt("g0"))[0].incarnation, hand.accept(prompt("other"))[0].incarnation] == [1, 0]


def test_an_id_twice_in_one_request_is_refused() -> None:
    with pytest.raises(RequestError) as no:
        LedgerDriver().accept(prompt("a"), prompt("b"), prompt("a"))
    assert (no.value.status, no.value.field) == (409, "prompts[2].id")


def test_a_seed_depends_on_sampling_seed_id_incarnation_and_index_only() -> None:
    """63 bits of (sampling seed, id, incarnation, index); not of the run, the rank or the order of arrival."""
    a, b = LedgerDriver("a"), LedgerDriver("b")
    a.accept(prompt("first"))
    seeds = [hand.accept(prompt("p", n=2, seed=7))[0].samples[1].seed for hand in (a, b)]
    assert seeds == [sample_seed(7, "p", 0, 1)] * 2
    others = {sample_seed(*args) for args in ((8, "p", 0, 1), (7, "q", 0, 1), (7, "p", 1, 1), (7, "p", 0, 0))}
    assert len(others | {seeds[0]}) == 5
    assert all(0 <= seed < 2**63 for seed in others)
    assert sample_seed(0, "p", 0, 0) == 1274596442402085155


def test_groups_are_whole_when_every_undelivered_member_has_finished() -> None:
    hand = LedgerDriver()
    group, single = hand.groups(2, 1)
    hand.finish(group.samples[1], single.samples[0])
    assert (group.whole, single.whole, hand.run.whole, hand.run.finished) == (False, True, 1, 2)
    hand.finish(group.samples[0])
    assert (group.whole, hand.run.whole, group.finish_step) == (True, 2, 2)


def test_spans_open_only_at_changes_and_cover_all_tokens() -> None:
    """Suspending and resuming on pages of the same version opens none; a span without tokens is none."""
    hand = LedgerDriver()
    (group,) = hand.groups(1)
    sample = group.samples[0]
    hand.start(sample, version=1)
    sample.open_span(2, "fresh")
    hand.grow(sample, tokens=3)
    sample.open_span(2, "fresh")
    hand.grow(sample, tokens=1)
    sample.open_span(3, "kept")
    sample.open_span(4, "recomputed")
    hand.grow(sample, tokens=2)
    sample.open_span(5, "kept")
    assert sample.closed_spans() == [Span(0, 4, 2, "fresh"), Span(4, 6, 4, "recomputed")]
    sample.open_span(4, "recomputed")
    hand.grow(sample, tokens=1)
    assert sample.closed_spans() == [Span(0, 4, 2, "fresh"), Span(4, 7, 4, "recomputed")]


def test_the_oldest_version_of_a_group_includes_finished_members() -> None:
    """Staleness is that of any undelivered sample; unstarted ones have no version."""
    hand = LedgerDriver()
    (group,) = hand.groups(3)
    assert group.oldest_version() is None
    hand.begin(group.samples[0], version=4)
    hand.finish(group.samples[1], version=3)
    assert group.oldest_version() == 3
    hand.ledger.deliver(group, [1])
    assert group.oldest_version() == 4
