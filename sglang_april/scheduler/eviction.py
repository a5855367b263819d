"""Which partials move to a lower tier when memory runs short.

A pure function of lengths, versions, admission orders and token budgets, so that all ranks decide alike
(`rank-determinism`). Recompute time per byte grows with length (attention is quadratic, bytes are linear;
`BW* = 2 b eff / (2 p + c T)` falls with T), so under a byte budget the longest samples are kept first.

The KV of an ended leg saves a prefill only if its trajectory returns. Its expected return falls with the time for which
it has been parked: trajectories that never return remain, and tool delays have a long tail. So it is evicted before all
samples that will resume, and what was parked first goes first (`bench/parked_order.py`).
"""

import heapq
from collections.abc import Callable, Collection

from sglang_april.kv.kv_pages import KvState, Pages, Tier
from sglang_april.scheduler.state import Sample, State

_MIN_COMPACT = 64
_PARKED = 1 << 200
"""Subtracted from the priority of a parked sample, which is below that of all others."""
_ON_DEVICE = frozenset({KvState.DEVICE, KvState.DEVICE_WITH_COPY})
_NOT_ON_DEVICE = frozenset({KvState.COPYING_OUT, KvState.COPYING_OUT_SLOTS_FREED, KvState.STORED})


def eviction_priority(sample: Sample) -> int:
    """Smaller is evicted first: parked samples in the order of their steps, then least recompute time per byte, then
    newer tokens, then later admission.

    Packs the three into one unique integer, 64 bits each, because heaps compare integers fastest. It is constant while
    the sample is suspended, and cached with its pages: hence the version of the oldest token instead of its staleness,
    which grows for all samples alike.
    """
    pages = sample.kv.pages
    assert pages is not None
    if pages.priority is None and sample.state is State.PARKED:
        pages.priority = (sample.finish_step << 64) - sample.queue_position - _PARKED
    elif pages.priority is None:
        pages.priority = (pages.length << 128) - ((sample.oldest_version or 0) << 64) - sample.queue_position
    return pages.priority


class EvictionQueue:
    """The samples of one tier in eviction order; those of mandatory groups (`staleness-bound`) come last.

    A heap with lazy deletion: samples that have left the tier are dropped when they reach the top, and when the heap is
    four times as large as after the last compaction, so each costs O(log n) amortised.
    """

    def __init__(self, in_tier: Callable[[Pages], bool], must_finish: Callable[[Sample], bool]) -> None:
        """`in_tier`: whether pages are still in this tier and can be moved."""
        self._in_tier, self._must_finish = in_tier, must_finish
        self._heap: list[int] = []
        self._mandatory: list[int] = []
        """Priorities of mandatory samples that reached the top of the first heap."""
        self._samples: dict[int, Sample] = {}
        """Samples of both heaps by priority; each priority is in one heap, once."""
        self._compact_at = _MIN_COMPACT

    def push(self, sample: Sample) -> None:
        """Add a sample; a no-op if its pages left the tier and came back before they were dropped here."""
        key = eviction_priority(sample)
        if key in self._samples:
            return
        self._samples[key] = sample
        heapq.heappush(self._heap, key)
        if len(self._heap) > self._compact_at:
            self._compact()

    def first(self, excluding: Collection[Sample] = ()) -> Sample | None:
        """The sample that is evicted next; it stays in the queue."""
        skipped = []
        while (sample := self._first()) is not None and sample in excluding:
            skipped.append(sample)
            self.pop()
        for other in skipped:
            self.push(other)
        return sample

    def _first(self) -> Sample | None:
        heap, samples, must_finish = self._heap, self._samples, self._must_finish
        while heap:
            key = heap[0]
            sample = samples[key]
            if not self._is_valid(key, sample):
                del samples[heapq.heappop(heap)]
            elif must_finish(sample):
                heapq.heappush(self._mandatory, heapq.heappop(heap))
            else:
                return sample
        while heap := self._mandatory:
            sample = samples[heap[0]]
            if self._is_valid(heap[0], sample):
                return sample
            del samples[heapq.heappop(heap)]
        return None

    def pop(self) -> Sample | None:
        sample = self._first()
        if sample is not None:
            del self._samples[heapq.heappop(self._heap or self._mandatory)]
        return sample

    def pop_below(self, bound: tuple[bool, int]) -> Sample | None:
        """Pop the next sample if its (mandatory, priority) is at most `bound`."""
        sample = self._first()
        if sample is None:
            return None
        # `_first` leaves the first heap empty if the next sample is mandatory.
        heap = self._heap or self._mandatory
        if (heap is self._mandatory, heap[0]) > bound:
            return None
        del self._samples[heapq.heappop(heap)]
        return sample

    def reset_mandatory(self) -> None:
        """After a round has ended: its mandatory samples are ordinary ones again."""
        for key in self._mandatory:
            heapq.heappush(self._heap, key)
        self._mandatory = []

    def _is_valid(self, key: int, sample: Sample) -> bool:
        pages = sample.kv.pages
        return pages is not None and pages.priority == key and self._in_tier(pages)

    def _compact(self) -> None:
        samples = self._samples
        for key in [key for key in self._heap if not self._is_valid(key, samples[key])]:
            del samples[key]
        self._heap = [key for key in self._heap if key in samples]
        heapq.heapify(self._heap)
        self._compact_at = max(_MIN_COMPACT, 4 * len(self._heap))


def select_victims(
    queue: EvictionQueue, newcomer: Sample, *, mandatory: bool, freed: Callable[[Sample], int], short: int
) -> list[Sample] | None:
    """Select the samples to evict from a tier so that `newcomer` fits.

    Args:
        queue: the samples of the tier; those returned are removed from it.
        newcomer: a sample with pages; `mandatory` is whether its group is.
        freed: tokens of the tier's budget that evicting a sample frees.
        short: tokens that are missing; nothing is evicted if it is not positive.

    Returns:
        As few samples as needed, each of lower priority than the newcomer; None, and the queue is unchanged, if they
        do not free enough.
    """
    victims: list[Sample] = []
    bound = (mandatory, eviction_priority(newcomer))
    while short > 0:
        sample = queue.pop_below(bound)
        if sample is None:
            for victim in victims:
                queue.push(victim)
            return None
        victims.append(sample)
        short -= freed(sample)
    return victims


def movable_in(tier: Tier) -> Callable[[Pages], bool]:
    """A predicate: pages that can be moved out of this tier. They are in it, or on their way to it, and not loading."""
    states = _ON_DEVICE if tier == "device" else _NOT_ON_DEVICE
    return lambda pages: pages.state in states and pages.tier == tier


def copy_cost(sample: Sample) -> int:
    """Tokens of the budget that discarding the copy frees at least: its prefix may have other users."""
    pages = sample.kv.pages
    return pages.copy.cost if pages is not None and pages.copy is not None else 0
