"""Eviction order and victims: pure functions of lengths, versions, admission order and token budgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.eviction import EvictionQueue, eviction_priority, select_victims
from sglang_april.scheduler.state import Sample
from tests.unit.ledger_driver import LedgerDriver, names


def stored(*lengths: int, versions: tuple[int, ...] = ()) -> list[Sample]:
    """Suspended samples with these KV lengths, admitted in this order."""
    driver = LedgerDriver()
    samples = [g.samples[0] for g in driver.groups(*[1] * len(lengths))]
    for i, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        driver.begin(sample, version=versions[i] if versions else 0)
        driver.start(sample)
        driver.suspend(sample, pages=length)
    return samples


def never(sample: Sample) -> bool:
    return False


def queue_of(samples: list[Sample], must_finish: object = never) -> EvictionQueue:
    queue = EvictionQueue(lambda pages: True, must_finish)  # type: ignore[arg-type]
    for sample in samples:
        queue.push(sample)
    return queue


def in_order(queue: EvictionQueue) -> list[str]:
    return names(list(iter(queue.pop, None)))


def length(sample: Sample) -> int:
    return sample.kv.pages.length if sample.kv.pages else 0


def test_short_samples_are_evicted_before_long_ones() -> None:
    """Under a byte budget the longest samples are kept first."""
    assert in_order(queue_of(stored(30, 10, 20))) == ["g1.0", "g2.0", "g0.0"]


def test_equal_lengths_evict_the_less_stale_then_the_last_admitted() -> None:
    assert in_order(queue_of(stored(10, 10, 10, versions=(1, 2, 1)))) == ["g1.0", "g2.0", "g0.0"]


def test_mandatory_samples_are_evicted_last() -> None:
    """Regardless of length, until their round has ended."""
    samples = stored(1, 30, 20)
    mandatory = [samples[0]]
    queue = queue_of(samples, mandatory.__contains__)
    assert queue.first() is samples[2]
    mandatory.clear()
    queue.reset_mandatory()
    assert in_order(queue) == ["g0.0", "g2.0", "g1.0"]
    assert in_order(queue_of(samples, lambda s: s is samples[0])) == ["g2.0", "g1.0", "g0.0"]


@pytest.mark.parametrize(
    ("cap", "evicted"),
    [(100, []), (60, []), (59, ["g0.0"]), (50, ["g0.0"]), (49, ["g0.0", "g1.0"]), (30, ["g0.0", "g1.0"]), (29, None)],
)
def test_as_few_samples_as_needed_are_evicted(cap: int, evicted: list[str] | None) -> None:
    """The lowest priorities go, until the newcomer fits."""
    *there, newcomer = stored(10, 20, 30)
    queue = queue_of(there)
    gone = select_victims(queue, newcomer, mandatory=False, freed=length, short=30 + 30 - cap)
    assert gone == evicted if gone is None else names(gone) == evicted
    assert in_order(queue) == [n for n in ("g0.0", "g1.0") if n not in (evicted or [])]


def test_a_newcomer_never_evicts_higher_priority_or_mandatory_samples() -> None:
    """The newcomer is not stored then."""
    long, short, newcomer = stored(30, 10, 20)
    assert select_victims(queue_of([long]), newcomer, mandatory=False, freed=length, short=1) is None
    must = queue_of([short], lambda s: s is short)
    assert select_victims(must, newcomer, mandatory=False, freed=length, short=1) is None
    assert select_victims(must, newcomer, mandatory=True, freed=length, short=1) == [short]
    assert select_victims(queue_of([short]), newcomer, mandatory=False, freed=length, short=1) == [short]


def test_a_sample_can_be_queued_again_at_the_same_length() -> None:
    """Suspended, resumed and suspended in one step: other pages, the same priority."""
    samples = stored(5, 4)
    queue = queue_of(samples)
    samples[0].kv.pages = Pages(5, 0, [0] * 5, None, None)
    queue.push(samples[0])
    assert in_order(queue) == ["g1.0", "g0.0"]


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=40))
def test_the_queue_equals_a_sorted_list(items: list[tuple[int, bool, bool]]) -> None:
    """With samples that left the tier, were queued twice, or are mandatory."""
    samples = stored(*(size for size, _, _ in items))
    gone = {s for s, (_, left, _) in zip(samples, items, strict=True) if left}
    must = {s for s, (_, _, must) in zip(samples, items, strict=True) if must}
    queue = EvictionQueue(lambda pages: pages not in {s.kv.pages for s in gone}, must.__contains__)
    for sample in samples * 3:
        queue.push(sample)
        queue.first()
    found = list(dict.fromkeys(iter(queue.pop, None)))
    assert found == sorted(set(samples) - gone, key=lambda s: (s in must, eviction_priority(s)))


def test_a_sample_queued_twice_is_evicted_once() -> None:
    """Its tokens are counted as freed once."""
    short, middle, long = stored(10, 20, 40)
    queue = queue_of([short, middle, short])
    assert select_victims(queue, long, mandatory=False, freed=length, short=15) == [short, middle]
