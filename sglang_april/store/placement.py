"""Step 5 of 9 (store): which partials give way when memory runs short.

Pure: a function of lengths, versions, admission orders and budgets in tokens, so that every rank decides alike (S9).
Recompute time per byte grows with length (attention is quadratic, bytes are linear; `BW* = 2 b eff / (2 p + c T)` falls
with T), so under a byte budget the longest samples are kept first.
"""

import heapq
from collections.abc import Callable

from sglang_april.store.entry import CopyTier, Pages
from sglang_april.types import Sample

Key = tuple[int, int, int]
_Entry = tuple[int, int, int, int, Sample, Pages]
_SMALL = 64


def worth(sample: Sample) -> Key:
    """Smaller gives way first: least recompute time per byte, then less stale, then admitted later.

    Constant while the sample is suspended, and so kept with its pages: the oldest token's version stands here, not the
    staleness, which rises for all alike.
    """
    pages = sample.pages
    assert pages is not None
    if pages.worth is None:
        pages.worth = (pages.length, -(sample.oldest_version or 0), -sample.order)
    return pages.worth


class Shelf:
    """The samples of one tier, ordered by who gives way first; mandatory groups (S4) last.

    A heap, keyed once when a sample comes. Samples that left are found when their turn comes, and when the heap is four
    times as large as after the last look, so that each costs O(log n) in all.
    """

    def __init__(self, there: Callable[[Pages], bool], must_finish: Callable[[Sample], bool]) -> None:
        """`there`: whether pages are still in this tier and may be moved."""
        self._there, self._must_finish = there, must_finish
        self._heap: list[_Entry] = []
        self._mandatory: list[_Entry] = []
        """Passed over so far."""
        self._limit = _SMALL
        self._pushes = 0
        """So that two entries of one sample never compare further."""

    def push(self, sample: Sample) -> None:
        pages = sample.pages
        assert pages is not None
        self._pushes += 1
        heapq.heappush(self._heap, (*worth(sample), self._pushes, sample, pages))
        if len(self._heap) > self._limit:
            # Pages that left and came back are here twice.
            self._heap = list({id(e[5]): e for e in self._heap if self._valid(e)}.values())
            heapq.heapify(self._heap)
            self._limit = max(_SMALL, 4 * len(self._heap))

    def first(self) -> Sample | None:
        """Who gives way first; stays on the shelf."""
        heap, must_finish = self._heap, self._must_finish
        while heap:
            entry = heap[0]
            if not self._valid(entry):
                heapq.heappop(heap)
            elif must_finish(entry[4]):
                heapq.heappush(self._mandatory, heapq.heappop(heap))
            else:
                return entry[4]
        while self._mandatory and not self._valid(self._mandatory[0]):
            heapq.heappop(self._mandatory)
        return self._mandatory[0][4] if self._mandatory else None

    def pop(self) -> Sample | None:
        sample = self.first()
        if sample is not None:
            heapq.heappop(self._heap or self._mandatory)
        return sample

    def pop_below(self, bound: tuple[bool, Key]) -> Sample | None:
        """Who gives way first, if it is worth less than (mandatory, worth)."""
        if self.first() is None:
            return None
        # Whoever leads the second heap is mandatory: the first is empty then.
        heap = self._heap or self._mandatory
        if (heap is self._mandatory, heap[0][:3]) > bound:
            return None
        return heapq.heappop(heap)[4]

    def bounds_changed(self) -> None:
        """A round has ended: what was mandatory in it may give way as others do."""
        for entry in self._mandatory:
            heapq.heappush(self._heap, entry)
        self._mandatory = []

    def _valid(self, entry: _Entry) -> bool:
        return entry[4].pages is entry[5] and self._there(entry[5])


def give_way(
    shelf: Shelf, newcomer: Sample, *, mandatory: bool, gain: Callable[[Sample], int], short: int
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
    leaving: dict[Sample, None] = {}
    own = (mandatory, worth(newcomer))
    while short > 0:
        sample = shelf.pop_below(own)
        if sample is None:
            for stays in leaving:
                shelf.push(stays)
            return None
        if sample not in leaving:  # pages that left and came back are on the shelf twice
            leaving[sample] = None
            short -= gain(sample)
    return list(leaving)


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
