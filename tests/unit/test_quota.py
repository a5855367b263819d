"""When a round ends and what it delivers, as pure functions of the ledger and the version."""

import pytest

from sglang_april.api.messages import Delivery
from sglang_april.scheduler.quota import Round
from tests.unit.ledger_driver import LedgerDriver


def delivered(
    driver: LedgerDriver, rnd: Round, reason: str = "quota", ids: list[str] | None = None
) -> list[tuple[str, list[int]]]:
    parts: list[Delivery] = rnd.deliver(driver.ledger, reason, ids, version=0)  # type: ignore[arg-type]
    return [(d.id, d.indices) for d in parts]


# --- ends_now


@pytest.mark.parametrize(
    ("quota", "unit", "reason"),
    [
        (1, "group", "quota"),
        (2, "group", None),
        (3, "sample", "quota"),
        (4, "sample", None),
        (None, "group", None),
        (None, "sample", None),
    ],
)
def test_quota_counts_groups_or_samples(quota: int | None, unit: str, reason: str | None) -> None:
    """Whole groups, or finished samples; here one group of two is whole and one of two half finished."""
    driver = LedgerDriver()
    whole, half = driver.groups(2, 2)
    driver.finish(*whole.samples.values(), half.samples[0])
    assert driver.round(quota=quota, quota_unit=unit).ends_now() == reason


def test_the_round_is_exhausted_when_all_has_finished() -> None:
    """Also with a quota beyond what there is; with exactly as much as the quota, the quota is the reason."""
    driver = LedgerDriver()
    groups = driver.groups(1, 1)
    assert driver.round(quota=None).ends_now() is None
    driver.finish(*(g.samples[0] for g in groups))
    assert [driver.round(quota=q).ends_now() for q in (None, 1, 2, 3)] == ["exhausted", "quota", "quota", "exhausted"]


def test_an_empty_round_is_exhausted() -> None:
    """Empty prompts and an empty carry."""
    assert LedgerDriver().round(quota=5).ends_now() == "exhausted"


@pytest.mark.parametrize("unit", ["group", "sample"])
def test_mandatory_group_keeps_the_round_open_until_it_is_whole(unit: str) -> None:
    """All its members, unstarted ones too."""
    driver = LedgerDriver()
    done, stale = driver.groups(1, 2)
    driver.begin(stale.samples[0], version=0)
    driver.finish(done.samples[0], version=3)
    rnd = driver.round(version=3, max_staleness=3, quota_unit=unit)
    assert (rnd.mandatory, rnd.ends_now()) == ({stale}, None)
    driver.finish(stale.samples[0])
    assert rnd.ends_now() is None
    driver.finish(stale.samples[1], version=3)
    assert rnd.ends_now() == "quota"


def test_dropped_mandatory_group_does_not_keep_the_round_open() -> None:
    """`stop` overrides the staleness bound."""
    driver = LedgerDriver()
    done, stale = driver.groups(1, 1)
    driver.begin(stale.samples[0])
    driver.finish(done.samples[0])
    rnd = driver.round(version=5)
    driver.ledger.drop(driver.run, ["g1"])
    assert rnd.ends_now() == "quota"


def test_strict_on_policy_waits_for_every_group_with_tokens() -> None:
    """`max_staleness: 0`: none is carried with tokens; groups without any do not count."""
    driver = LedgerDriver()
    done, begun, _ = driver.groups(1, 1, 1)
    rnd = driver.round(max_staleness=0)
    driver.finish(done.samples[0])
    assert rnd.ends_now() == "quota"
    driver.begin(begun.samples[0])
    assert rnd.ends_now() is None
    driver.finish(begun.samples[0])
    assert rnd.ends_now() == "quota"


def test_strict_on_policy_waits_for_its_cohort_too() -> None:
    """A group of an older round whose members with tokens have been delivered already."""
    driver = LedgerDriver()
    old, new = driver.groups(2, 1)
    driver.finish(old.samples[0])
    old.first_round = 0
    driver.ledger.deliver(old, [0])
    rnd = driver.round(quota_unit="sample", max_staleness=0, quota_mode="cohort")
    rnd.mark_cohort()
    driver.finish(new.samples[0])
    assert rnd.ends_now() is None
    driver.finish(old.samples[1])
    assert rnd.ends_now() == "quota"


# --- staleness


@pytest.mark.parametrize(
    ("version", "bound", "stale", "over"),
    [(2, 3, False, False), (4, 3, False, False), (5, 3, True, False), (6, 3, True, True), (9, None, False, False)],
)
def test_the_bound_is_met_by_the_oldest_token(version: int, bound: int | None, stale: bool, over: bool) -> None:
    """Current version minus that of the oldest undelivered token, here 2."""
    driver = LedgerDriver()
    (group,) = driver.groups(3)
    assert not group.is_stale(99, 0)
    driver.begin(group.samples[0], version=4)
    driver.finish(group.samples[1], version=2)
    assert group.staleness(version) == version - 2
    assert (group.is_stale(version, bound), group.is_over(version, bound)) == (stale, over)


def test_a_push_inside_the_round_adds_to_what_must_finish() -> None:
    """Marked at the start and after every push, never taken back."""
    driver = LedgerDriver()
    old, young = driver.groups(1, 1)
    driver.begin(old.samples[0], version=0)
    driver.begin(young.samples[0], version=1)
    rnd = driver.round(version=2, max_staleness=2)
    assert rnd.mandatory == {old}
    rnd.mark_mandatory(3)
    assert rnd.mandatory == {old, young}


@pytest.mark.parametrize(("quota", "left"), [(None, None), (4, 2), (2, 0), (1, 0)])
def test_how_many_more_groups_may_start_under_strict_on_policy(quota: int | None, left: int | None) -> None:
    """What the quota still needs; two groups have begun here, more than a quota of one."""
    driver = LedgerDriver()
    begun, done, *_ = driver.groups(1, 1, 1, 1)
    driver.begin(begun.samples[0])
    driver.finish(done.samples[0])
    assert driver.round(quota=quota, max_staleness=0).starts_left() == left
    assert driver.round(quota=quota, max_staleness=1).starts_left() is None


@pytest.mark.parametrize(("quota", "left"), [(1, 0), (3, 0), (4, 1)])
def test_strict_on_policy_counts_samples_of_begun_groups(quota: int, left: int) -> None:
    """Unit `sample`: one group more at a time, as long as those that have begun cannot meet the quota."""
    driver = LedgerDriver()
    begun, _ = driver.groups(3, 3)
    driver.begin(begun.samples[0])
    assert driver.round(quota=quota, quota_unit="sample", max_staleness=0).starts_left() == left


# --- deliver


def test_quota_is_delivered_in_finish_then_admission_order() -> None:
    """Carried ones first, then the finish step, then admission, whatever the order of arrival."""
    driver = LedgerDriver()
    a, b, c, d = driver.groups(1, 1, 1, 1)
    driver.start(d.samples[0], b.samples[0], a.samples[0], c.samples[0])
    driver.grow(*(g.samples[0] for g in (a, b, c, d)))
    driver.finish(c.samples[0])
    driver.finish(a.samples[0], b.samples[0], d.samples[0])
    assert delivered(driver, driver.round(quota=3)) == [("g2", [0]), ("g3", [0]), ("g1", [0])]
    assert [g.id for g in driver.run.groups.values()] == ["g0"]


@pytest.mark.parametrize("unit", ["group", "sample"])
def test_strict_on_policy_delivers_all_that_has_finished(unit: str) -> None:
    """Also beyond the quota: what would be carried could only be off-policy in the next round."""
    driver = LedgerDriver()
    groups = driver.groups(2, 1)
    driver.finish(*(s for g in groups for s in g.samples.values()))
    rnd = driver.round(quota=1, quota_unit=unit, max_staleness=0)
    assert rnd.ends_now() == "quota"
    assert dict(delivered(driver, rnd)) == {"g0": [0, 1], "g1": [0]}


def test_surplus_return_delivers_all_that_is_whole() -> None:
    """`quota-exact`."""
    driver = LedgerDriver()
    groups = driver.groups(1, 1, 1)
    driver.finish(*(g.samples[0] for g in groups))
    assert [name for name, _ in delivered(driver, driver.round(quota=1, surplus="return"))] == ["g0", "g1", "g2"]


def test_mandatory_groups_lead_and_go_beyond_the_quota() -> None:
    """`quota-exact` and `staleness-bound`."""
    driver = LedgerDriver()
    fresh, old, older = driver.groups(1, 1, 1)
    driver.begin(old.samples[0], older.samples[0], version=0)
    driver.finish(fresh.samples[0], version=2)
    driver.finish(old.samples[0], older.samples[0])
    rnd = driver.round(version=2, max_staleness=2)
    assert [name for name, _ in delivered(driver, rnd)] == ["g1", "g2"]
    assert list(driver.run.groups) == ["g0"]


def test_groups_over_the_bound_are_counted() -> None:
    """`stats.over_bound` counts them."""
    driver = LedgerDriver()
    at, over = driver.groups(1, 1)
    driver.finish(at.samples[0], version=2)
    driver.finish(over.samples[0], version=1)
    rnd = driver.round(version=3, max_staleness=1)
    rnd.deliver(driver.ledger, "quota", None, 3)
    assert rnd.stats.over_bound == 1


def test_samples_of_unfinished_groups_in_units_of_samples() -> None:
    """Finished samples at once, gathered by group, `complete` when nothing of it is left."""
    driver = LedgerDriver()
    a, b = driver.groups(3, 1)
    driver.finish(a.samples[2])
    driver.finish(b.samples[0])
    driver.finish(a.samples[0])
    parts = driver.round(quota=3, quota_unit="sample").deliver(driver.ledger, "quota", None, 0)
    assert [(d.id, d.indices, d.complete) for d in parts] == [("g0", [0, 2], False), ("g1", [0], True)]
    driver.finish(a.samples[1])
    parts = driver.round(quota_unit="sample").deliver(driver.ledger, "quota", None, 0)
    assert [(d.id, d.indices, d.complete) for d in parts] == [("g0", [1], True)]


def test_sample_quota_may_split_a_whole_group() -> None:
    """What is left of it is surplus and comes under the same id."""
    driver = LedgerDriver()
    (group,) = driver.groups(3)
    driver.finish(*group.samples.values())
    assert delivered(driver, driver.round(quota=2, quota_unit="sample")) == [("g0", [0, 1])]
    assert (driver.run.whole, driver.run.finished) == (1, 1)
    assert delivered(driver, driver.round(quota=2, quota_unit="sample"), "exhausted") == [("g0", [2])]


def test_a_stop_delivers_all_finished_or_those_that_are_named() -> None:
    """Never an unfinished one; a quota does not limit it."""
    driver = LedgerDriver()
    a, b, c, d = driver.groups(1, 1, 2, 1)
    driver.finish(a.samples[0], b.samples[0], c.samples[0], d.samples[0])
    rnd = driver.round(quota=1)
    assert delivered(driver, rnd, "stopped", ["g1", "g2", "unknown"]) == [("g1", [0])]
    assert delivered(driver, rnd, "stopped", []) == []
    assert delivered(driver, rnd, "stopped") == [("g0", [0]), ("g3", [0])]
