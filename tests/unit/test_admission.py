"""Admission order: partials, begun groups, new groups; slots are shared round-robin over runs."""

from sglang_april.scheduler.admission import PrefillBatcher, candidates, pick
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.quota import Round
from tests.unit.controller_harness import Build
from tests.unit.ledger_driver import LedgerDriver, names


def test_admission_order_is_partials_then_begun_groups_then_new_groups() -> None:
    driver = LedgerDriver()
    _, begun, partial, _ = driver.groups(1, 3, 1, 1)
    driver.begin(partial.samples[0])
    driver.start(begun.samples[1])
    assert names(list(candidates(driver.round()))) == ["g2.0", "g1.0", "g1.2", "g0.0", "g3.0"]


def test_partials_keep_their_old_batch_order() -> None:
    """The order of their first admission, not of their suspension."""
    driver = LedgerDriver()
    a, b, c = driver.groups(1, 1, 1)
    driver.start(b.samples[0], c.samples[0], a.samples[0])
    driver.grow(*(g.samples[0] for g in (a, b, c)))
    driver.suspend(a.samples[0], c.samples[0], b.samples[0])
    assert names(list(candidates(driver.round()))) == ["g1.0", "g2.0", "g0.0"]


def test_near_complete_groups_come_first() -> None:
    """Fewest unfinished members first, then arrival order."""
    driver = LedgerDriver()
    far, near, also_near = driver.groups(4, 4, 3)
    driver.finish(far.samples[0])
    driver.finish(near.samples[0], near.samples[1])
    driver.finish(also_near.samples[0])
    assert names(list(candidates(driver.round()))) == ["g1.2", "g1.3", "g2.1", "g2.2", "g0.1", "g0.2", "g0.3"]


def test_mandatory_samples_lead_their_class() -> None:
    """Mandatory partials before other partials, members of mandatory groups before other members."""
    driver = LedgerDriver()
    young, old = driver.groups(2, 2)
    driver.begin(young.samples[0], version=5)
    driver.begin(old.samples[0], version=0)
    rnd = driver.round(version=5)
    assert names(list(candidates(rnd))) == ["g1.0", "g0.0", "g1.1", "g0.1"]


def test_strict_on_policy_starts_only_what_the_quota_needs() -> None:
    """With `max_staleness: 0`; none if more groups have begun already."""
    driver = LedgerDriver()
    groups = driver.groups(1, 2, 1, 1)
    assert names(list(candidates(driver.round(quota=2, max_staleness=0)))) == ["g0.0", "g1.0", "g1.1"]
    driver.begin(*(g.samples[0] for g in groups[:2]))
    assert names(list(candidates(driver.round(quota=1, max_staleness=0)))) == ["g0.0", "g1.0", "g1.1"]


def test_no_more_samples_are_picked_than_slots() -> None:
    """Samples without a slot stay untouched."""
    driver = LedgerDriver()
    driver.groups(3, 3)
    rnd = driver.round()
    assert [names(pick([rnd], slots)) for slots in (0, 2)] == [[], ["g0.0", "g0.1"]]
    assert len(pick([rnd], 100)) == 6
    assert driver.run.running == 0


def test_runs_share_slots_round_robin() -> None:
    """Over the open rounds in their order; a run without candidates is skipped."""
    ledger = Ledger()
    drivers = [LedgerDriver(name, ledger) for name in ("a", "b", "c")]
    drivers[0].groups(1, 1, 1)
    drivers[1].groups(1)
    rounds = [driver.round() for driver in drivers]
    assert [f"{s.group.run.name}.{s.group.id}" for s in pick(rounds, 9)] == ["a.g0", "b.g0", "a.g1", "a.g2"]
    assert [s.group.run.name for s in pick(rounds[::-1], 2)] == ["b", "a"]


def test_concurrency_bounds_a_run() -> None:
    """Running samples count towards the bound."""
    ledger = Ledger()
    bounded, free = LedgerDriver("bounded", ledger), LedgerDriver("free", ledger)
    group, *_ = bounded.groups(1, 1, 1, 1)
    free.groups(1, 1, 1)
    rounds = [bounded.round(concurrency=2), free.round()]
    assert [s.group.run.name for s in pick(rounds, 9)].count("bounded") == 2
    bounded.start(group.samples[0])
    assert [s.group.run.name for s in pick(rounds, 9)].count("bounded") == 1
    assert [s.group.run.name for s in pick([bounded.round(concurrency=1), free.round()], 9)] == ["free"] * 3


def test_the_choice_does_not_depend_on_hash_order() -> None:
    """`Round.mandatory` is a set, which iterates by the addresses of its groups: they differ from rank to rank."""
    driver = LedgerDriver()
    groups = driver.groups(*[1] * 50)
    driver.begin(*(group.samples[0] for group in reversed(groups)), version=0)
    rnd = driver.round(version=5)
    assert len(rnd.mandatory) == 50
    assert names(pick([rnd], 50)) == [f"g{i}.0" for i in reversed(range(50))]


def waits(batcher: PrefillBatcher, rnd: Round, slots: int) -> int:
    """Steps for which the batcher delays a prefill for `slots` free slots."""
    steps = 0
    while not batcher.is_due([rnd], pick([rnd], slots), slots):
        steps += 1
    return steps


def crowd(running: int, queued: int = 100, **spec: object) -> Round:
    """A round with `running` running samples and `queued` new groups of one."""
    driver = LedgerDriver()
    driver.start(*(g.samples[0] for g in driver.groups(*[1] * running)))
    driver.groups(*[1] * queued)
    return driver.round(**spec)


def test_prefill_waits_until_idle_slots_have_lost_its_cost() -> None:
    """A prefill stalls all running samples for about a step; a free slot loses one token per step."""
    assert [waits(PrefillBatcher(), crowd(60), free) for free in (1, 4, 7, 60)] == [59, 14, 8, 0]
    assert waits(PrefillBatcher(), crowd(0), 64) == 0
    batcher, rnd = PrefillBatcher(), crowd(6)
    due = [batcher.is_due([rnd], pick([rnd], free), free) for free in (1, 2, 3, 1)]
    assert due == [False, False, True, False]


def test_prefill_of_samples_that_hold_a_round_open_does_not_wait() -> None:
    """The last queued samples, mandatory groups, strict on-policy rounds."""
    assert waits(PrefillBatcher(), crowd(60, queued=3), 4) == 0
    assert waits(PrefillBatcher(), crowd(60, max_staleness=0, quota=200), 4) == 0
    driver = LedgerDriver()
    driver.start(*(g.samples[0] for g in driver.groups(*[1] * 60)))
    (old,) = driver.groups(9)
    driver.begin(old.samples[0])
    assert waits(PrefillBatcher(), driver.round(version=5), 4) == 0
    assert waits(PrefillBatcher(), driver.round(version=4), 4) == 14


def test_prefills_are_batched_within_a_concurrency_bound() -> None:
    """A run with `concurrency: 8` delays its eighth sample, however many slots are free."""
    assert waits(PrefillBatcher(), crowd(7, concurrency=8), 64) == 6


def test_batched_admission_saves_prefills(harness: Build) -> None:
    """Fewer prefills for the same samples; nothing decodes in the step of a prefill."""
    w = harness(slots=16, pool=2000, chunk=64)
    prefills = 0

    def count(rows: list[object]) -> None:
        nonlocal prefills
        prefills += any(row.prefilled for row in rows)  # type: ignore[attr-defined]

    w.engine.on_forward = count
    w.open("run", {f"p{i}": (2, 1, -(5 + 7 * i % 23)) for i in range(96)}, quota=96)
    w.reply()
    assert prefills < 40
