"""The ledger: one state per sample, one delivery, correct counters; ids and seeds."""

import pytest

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import Span
from sglang_april.scheduler import ledger
from sglang_april.scheduler.state import LedgerError, State, sample_seed
from tests.unit.ledger_driver import LedgerDriver, prompt

QUEUED, RUNNING, SUSPENDED, FINISHED, PARKED = State
ALLOWED = {
    (QUEUED, RUNNING),
    (RUNNING, QUEUED),
    (RUNNING, SUSPENDED),
    (RUNNING, FINISHED),
    (SUSPENDED, RUNNING),
    (QUEUED, PARKED),
    (RUNNING, PARKED),
    (SUSPENDED, PARKED),
    (PARKED, QUEUED),
}


@pytest.mark.parametrize("before", State)
@pytest.mark.parametrize("after", State)
def test_only_allowed_transitions_change_the_state(before: State, after: State) -> None:
    """A finished sample stays finished, and a queued one cannot be suspended."""
    driver = LedgerDriver()
    (group,) = driver.groups(1)
    sample = group.samples[0]
    path = {QUEUED: [], RUNNING: [RUNNING], SUSPENDED: [RUNNING, SUSPENDED], FINISHED: [RUNNING, FINISHED]}
    for state in (path | {PARKED: [PARKED]})[before]:
        sample.move(state)
    if (before, after) in ALLOWED:
        sample.move(after)
        assert (sample.state, group.counts[after], group.counts[before]) == (after, 1, 0)
    else:
        with pytest.raises(LedgerError):
            sample.move(after)
        assert (sample.state, group.counts[before]) == (before, 1)


def test_a_suspended_sample_without_a_token_is_queued_again() -> None:
    """Its group counts as new again."""
    driver = LedgerDriver()
    group, _ = driver.groups(2, 1)
    driver.start(*group.samples.values())
    driver.suspend(*group.samples.values())
    assert group.counts[QUEUED] == 2
    assert (group.queue, driver.run.suspended, driver.run.running) == ("new", {}, 0)
    assert [g.id for g in driver.run.queued.new] == ["g0", "g1"]


def test_groups_with_queued_members_are_in_the_admission_queues() -> None:
    """Members of groups already begun come before new groups."""
    driver = LedgerDriver()
    group, other = driver.groups(2, 2)
    driver.start(group.samples[0])
    assert (group.queue, list(driver.run.queued.begun), driver.run.queued.new) == ("begun", [group], [other])
    driver.start(group.samples[1])
    assert (group.queue, list(driver.run.queued.begun)) == ("", [])
    driver.grow(group.samples[0])
    driver.suspend(*group.samples.values())
    assert (group.queue, list(driver.run.queued.begun), list(driver.run.suspended)) == (
        "begun",
        [group],
        [group.samples[0]],
    )


def test_order_is_fixed_at_the_first_admission() -> None:
    """Kept over suspensions, so that a resumed batch has its old order."""
    driver = LedgerDriver()
    a, b = driver.groups(1, 1)
    driver.begin(b.samples[0])
    driver.begin(a.samples[0])
    driver.start(a.samples[0], b.samples[0])
    assert [b.samples[0].queue_position, a.samples[0].queue_position] == [0, 1]


def test_a_group_leaves_with_its_last_sample() -> None:
    """Its parts have the same id and incarnation; no sample is delivered twice."""
    driver = LedgerDriver()
    (group,) = driver.groups(3)
    driver.finish(group.samples[0], group.samples[2])
    part = driver.ledger.deliver(group, [2, 0])
    assert (part.id, part.incarnation, part.indices, part.complete) == ("g0", 0, [0, 2], False)
    assert (driver.run.finished, driver.run.whole, list(group.samples)) == (0, 0, [1])
    with pytest.raises(LedgerError):
        driver.ledger.deliver(group, [0])
    driver.finish(group.samples[1])
    assert (driver.run.finished, driver.run.whole) == (1, 1)
    assert driver.ledger.deliver(group, [1]).complete
    assert (driver.run.groups, driver.run.finished, driver.run.whole) == ({}, 0, 0)


def test_an_unfinished_sample_cannot_be_delivered() -> None:
    driver = LedgerDriver()
    (group,) = driver.groups(1)
    driver.start(group.samples[0])
    with pytest.raises(LedgerError):
        driver.ledger.deliver(group, [0])


def test_a_drop_deletes_the_named_groups_in_any_state() -> None:
    """Counters and admission queues are updated."""
    driver = LedgerDriver()
    _, begun, partial, done, kept = driver.groups(1, 2, 1, 1, 1)
    driver.start(begun.samples[0])
    driver.begin(partial.samples[0])
    driver.finish(done.samples[0])
    gone = driver.ledger.drop(driver.run, ["g0", "g1", "g2", "g3", "unknown"])
    assert len(gone) == 5
    run = driver.run
    assert (run.running, run.finished, run.whole, run.suspended, run.queued.begun) == (0, 0, 0, {}, {})
    assert (run.queued.new, list(run.groups)) == ([kept], ["g4"])
    assert driver.ledger.census() == {"queued": 1, "running": 0, "suspended": 0, "finished": 0}
    assert driver.ledger.drop(run, None) == [kept.samples[0]]


def test_a_delivered_id_can_be_used_again_as_a_new_incarnation() -> None:
    """Before, the whole request is refused; another run has its own ids."""
    driver = LedgerDriver()
    (group,) = driver.groups(1)
    with pytest.raises(RequestError) as no:
        driver.accept(prompt("other"), prompt("g0"))
    assert (no.value.status, no.value.field, list(driver.run.groups)) == (409, "prompts[1].id", ["g0"])
    assert LedgerDriver("another", driver.ledger).accept(prompt("g0"))[0].incarnation == 0
    driver.finish(group.samples[0])
    driver.ledger.deliver(group, [0])
    assert [driver.accept(prompt("g0"))[0].incarnation, driver.accept(prompt("other"))[0].incarnation] == [1, 0]


def test_an_id_twice_in_one_request_is_refused() -> None:
    with pytest.raises(RequestError) as no:
        LedgerDriver().accept(prompt("a"), prompt("b"), prompt("a"))
    assert (no.value.status, no.value.field) == (409, "prompts[2].id")


def deliver_all(driver: LedgerDriver, *names: str) -> list[int]:
    """Accept and deliver prompts; returns their incarnations."""
    groups = driver.accept(*map(prompt, names))
    for group in groups:
        driver.finish(*group.samples.values())
        driver.ledger.deliver(group, [0])
    return [group.incarnation for group in groups]


def test_ids_and_runs_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten id comes back above every forgotten incarnation; an idle run is forgotten whole."""
    monkeypatch.setattr(ledger, "MAX_IDS", 3)
    monkeypatch.setattr(ledger, "MAX_RUNS", 2)
    driver = LedgerDriver()
    assert deliver_all(driver, "a", "b") + deliver_all(driver, "a", "c") == [0, 0, 1, 0]
    assert driver.ledger.forget("run", ()) == []
    assert deliver_all(driver, "d", "e") == [0, 0]
    assert driver.ledger.forget("run", ()) == [("run", ["b", "a"], 2)]
    assert list(driver.run.incarnations) == ["c", "d", "e"]
    assert deliver_all(driver, "a", "b", "c", "new") == [2, 2, 1, 2]
    others = [LedgerDriver(name, driver.ledger) for name in ("busy", "carries", "idle")]
    deliver_all(others[0], "a")
    others[1].accept(prompt("a"))
    deliver_all(others[2], "a")
    assert driver.ledger.forget("run", {"busy"})[1:] == [("idle", None, 0)]
    assert list(driver.ledger.runs) == ["busy", "carries", "run"]
    assert deliver_all(LedgerDriver("idle", driver.ledger), "a") == [0]


def test_a_seed_depends_on_sampling_seed_id_incarnation_and_index_only() -> None:
    """63 bits of (sampling seed, id, incarnation, index); not of the run, the rank or the order of arrival."""
    a, b = LedgerDriver("a"), LedgerDriver("b")
    a.accept(prompt("first"))
    seeds = [driver.accept(prompt("p", n=2, seed=7))[0].samples[1].seed for driver in (a, b)]
    assert seeds == [sample_seed(7, "p", 0, 1)] * 2
    others = {sample_seed(*args) for args in ((8, "p", 0, 1), (7, "q", 0, 1), (7, "p", 1, 1), (7, "p", 0, 0))}
    assert len(others | {seeds[0]}) == 5
    assert all(0 <= seed < 2**63 for seed in others)
    assert sample_seed(0, "p", 0, 0) == 1274596442402085155


def test_groups_are_whole_when_every_undelivered_member_has_finished() -> None:
    driver = LedgerDriver()
    group, single = driver.groups(2, 1)
    driver.finish(group.samples[1], single.samples[0])
    assert (group.whole, single.whole, driver.run.whole, driver.run.finished) == (False, True, 1, 2)
    driver.finish(group.samples[0])
    assert (group.whole, driver.run.whole) == (True, 2)
    assert [s.finish_step for s in group.samples.values()] == [2, 1]


def test_spans_open_only_at_changes_and_cover_all_tokens() -> None:
    """Resuming on pages of the same version opens none, and empty spans are left out."""
    driver = LedgerDriver()
    (group,) = driver.groups(1)
    sample = group.samples[0]
    driver.start(sample, version=1)
    sample.open_span(2, "fresh")
    driver.grow(sample, tokens=3)
    sample.open_span(2, "fresh")
    driver.grow(sample, tokens=1)
    sample.open_span(3, "kept")
    sample.open_span(4, "recomputed")
    driver.grow(sample, tokens=2)
    sample.open_span(5, "kept")
    assert sample.closed_spans() == [Span(0, 4, 2, "fresh"), Span(4, 6, 4, "recomputed")]
    sample.open_span(4, "recomputed")
    driver.grow(sample, tokens=1)
    assert sample.closed_spans() == [Span(0, 4, 2, "fresh"), Span(4, 7, 4, "recomputed")]


def test_the_oldest_version_of_a_group_includes_finished_members() -> None:
    """Delivered and unstarted samples do not count."""
    driver = LedgerDriver()
    (group,) = driver.groups(3)
    assert group.oldest_version() is None
    driver.begin(group.samples[0], version=4)
    driver.finish(group.samples[1], version=3)
    assert group.oldest_version() == 3
    driver.ledger.deliver(group, [1])
    assert group.oldest_version() == 4
