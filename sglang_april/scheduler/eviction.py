"""Step 5 of 9 (store): which partials give way when memory runs short.

Pure: a function of lengths, versions, admission orders and budgets in tokens, so that every rank decides alike (S9).
Recompute time per byte grows with length (attention is quadratic, bytes are linear; `BW* = 2 b eff / (2 p + c T)` falls
with T), so under a byte budget the longest samples are kept first.
"""

import heapq
from collections.abc import Callable

from sglang_april.kv.kv_pages import CopyTier, Pages
from sglang_april.scheduler.state import Sample

_SMALL = 64


def eviction_priority(sample: Sample) -> int:
    """Smaller gives way first: least recompute time per byte, then less stale, then admitted later.

    The three in one number, 64 bits each: heaps compare it fastest, and it differs from sample to sample. Constant
    while the sample is suspended, and so kept with its pages: the oldest token's version stands here, not the
    staleness, which rises for all alike.
    """
    pages = sample.pages
    assert pages is not None
    if pages.worth is None:
        pages.worth = (pages.length << 128) - ((sample.oldest_version or 0) << 64) - sample.order
    return pages.worth


class EvictionQueue:
    """The samples of one tier, ordered by who gives way first; mandatory groups (S4) last.

    A heap of what they are worth, worked out once when a sample comes. Samples that left are found when their turn
    comes, and when the heap is four times as large as after the last look, so that each costs O(log n) in all.
    """

    def __init__(self, there: Callable[[Pages], bool], must_finish: Callable[[Sample], bool]) -> None:
        """`there`: whether pages are still in this tier and may be moved."""
        self._there, self._must_finish = there, must_finish
        self._heap: list[int] = []
        self._mandatory: list[int] = []
        """Passed over so far."""
        self._samples: dict[int, Sample] = {}
        """Of both heaps; each worth stands in one of them, once."""
        self._limit = _SMALL

    def push(self, sample: Sample) -> None:
        """Pages that left and came back may still be here."""
        key = eviction_priority(sample)
        if key in self._samples:
            return
        self._samples[key] = sample
        heapq.heappush(self._heap, key)
        if len(self._heap) > self._limit:
            self._look_through()

    def first(self) -> Sample | None:
        """Who gives way first; stays on the shelf."""
        heap, samples, must_finish = self._heap, self._samples, self._must_finish
        while heap:
            key = heap[0]
            sample = samples[key]
            if not self._is_here(key, sample):
                del samples[heapq.heappop(heap)]
            elif must_finish(sample):
                heapq.heappush(self._mandatory, heapq.heappop(heap))
            else:
                return sample
        while heap := self._mandatory:
            sample = samples[heap[0]]
            if self._is_here(heap[0], sample):
                return sample
            del samples[heapq.heappop(heap)]
        return None

    def pop(self) -> Sample | None:
        sample = self.first()
        if sample is not None:
            del self._samples[heapq.heappop(self._heap or self._mandatory)]
        return sample

    def pop_below(self, bound: tuple[bool, int]) -> Sample | None:
        """Who gives way first, if it is worth less than (mandatory, worth)."""
        sample = self.first()
        if sample is None:
            return None
        # Whoever leads the second heap is mandatory: the first is empty then.
        heap = self._heap or self._mandatory
        if (heap is self._mandatory, heap[0]) > bound:
            return None
        del self._samples[heapq.heappop(heap)]
        return sample

    def bounds_changed(self) -> None:
        """A round has ended: what was mandatory in it may give way as others do."""
        for key in self._mandatory:
            heapq.heappush(self._heap, key)
        self._mandatory = []

    def _is_here(self, key: int, sample: Sample) -> bool:
        pages = sample.pages
        return pages is not None and pages.worth == key and self._there(pages)

    def _look_through(self) -> None:
        samples = self._samples
        for key in [key for key in self._heap if not self._is_here(key, samples[key])]:
            del samples[key]
        self._heap = [key for key in self._heap if key in samples]
        heapq.heapify(self._heap)
        self._limit = max(_SMALL, 4 * len(self._heap))


def select_victims(
    shelf: EvictionQueue, newcomer: Sample, *, mandatory: bool, gain: Callable[[Sample], int], short: int
) -> list[Sample] | None:
    """Who has to leave a tier so that `newcomer` fits.

    Args:
        shelf: the samples of the tier; those returned have left it.
        newcomer: a sample with pages; `mandatory` says whether its group is.
        gain: tokens of the tier's budget that a sample sets free.
        short: tokens that are missing; none leaves when it is not positive.

    Returns:
        As few as needed, each worth less than the newcomer; None, and nobody leaves, when the newcomer has to give way.
    """
    leaving: list[Sample] = []
    own = (mandatory, eviction_priority(newcomer))
    while short > 0:
        sample = shelf.pop_below(own)
        if sample is None:
            for stays in leaving:
                shelf.push(stays)
            return None
        leaving.append(sample)
        short -= gain(sample)
    return leaving


def rests_in(tier: CopyTier) -> Callable[[Pages], bool]:
    """Whether pages are there, and nowhere else but on their way there."""

    def rests(pages: Pages) -> bool:
        copy = pages.copy
        there = copy is not None and copy.tier == tier
        return there and (pages.slots is None or (pages.move is not None and pages.leaving))

    return rests


def copy_cost(sample: Sample) -> int:
    """Without a prefix, which others may stand on: so never too much."""
    return sample.pages.copy.cost if sample.pages is not None and sample.pages.copy is not None else 0
