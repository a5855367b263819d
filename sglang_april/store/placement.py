"""Step 5 of 9 (store): which partials give way when memory runs short.

Pure: a function of lengths, versions, admission orders and budgets in tokens, so that every rank decides alike (S9).
Recompute time per byte grows with length (attention is quadratic, bytes are linear; `BW* = 2 b eff / (2 p + c T)` falls
with T), so under a byte budget the longest samples are kept first.
"""

import heapq
from collections.abc import Callable

from sglang_april.types import Sample

Key = tuple[int, int, int]
_Entry = tuple[int, int, int, Sample]
_SMALL = 64


def worth(sample: Sample) -> Key:
    """Smaller gives way first: least recompute time per byte, then less stale, then admitted later.

    Constant while the sample is suspended: of the oldest token's version stands here, not the staleness, which rises
    for all alike.
    """
    return (sample.pages.length if sample.pages else 0, -(sample.oldest_version or 0), -sample.order)


class Shelf:
    """The samples of one tier, ordered by who gives way first; mandatory groups (S4) last.

    A heap, keyed once when a sample comes. Samples that left are found when their turn comes, and when as many have
    left as are there, so that each costs O(log n) in all.
    """

    def __init__(self, there: Callable[[Sample], bool], must_finish: Callable[[Sample], bool]) -> None:
        """`there`: whether the sample is still in this tier and may be moved."""
        self._there, self._must_finish = there, must_finish
        self._heap: list[_Entry] = []
        self._mandatory: list[_Entry] = []
        """Passed over so far."""
        self._limit = _SMALL

    def push(self, sample: Sample) -> None:
        heapq.heappush(self._heap, (*worth(sample), sample))
        if len(self._heap) > self._limit:
            # A sample that left and came back is here twice, with the same key if it is the same partial.
            self._heap = sorted({e[2]: e for e in self._heap if self._valid(e)}.values(), key=_key)
            self._limit = max(_SMALL, 2 * len(self._heap))

    def first(self) -> Sample | None:
        """Who gives way first; stays on the shelf."""
        while self._heap:
            if not self._valid(self._heap[0]):
                heapq.heappop(self._heap)
            elif self._must_finish(self._heap[0][3]):
                heapq.heappush(self._mandatory, heapq.heappop(self._heap))
            else:
                return self._heap[0][3]
        while self._mandatory and not self._valid(self._mandatory[0]):
            heapq.heappop(self._mandatory)
        return self._mandatory[0][3] if self._mandatory else None

    def pop(self) -> Sample | None:
        sample = self.first()
        if sample is not None:
            heapq.heappop(self._heap or self._mandatory)
        return sample

    def bounds_changed(self) -> None:
        """A round has ended: what was mandatory in it may give way as others do."""
        for entry in self._mandatory:
            heapq.heappush(self._heap, entry)
        self._mandatory = []

    def _valid(self, entry: _Entry) -> bool:
        sample = entry[3]
        return self._there(sample) and worth(sample) == entry[:3]


def _key(entry: _Entry) -> Key:
    return entry[:3]


def give_way(
    shelf: Shelf,
    newcomer: Sample,
    must_finish: Callable[[Sample], bool],
    gain: Callable[[Sample], int],
    short: int,
) -> list[Sample] | None:
    """Who has to leave a tier so that `newcomer` fits.

    Args:
        shelf: the samples of the tier; those returned have left it.
        newcomer: a sample with pages.
        gain: tokens of the tier's budget that a sample sets free.
        short: tokens that are missing; none leaves when it is not positive.

    Returns:
        As few as needed, each worth less than the newcomer; None, and nobody leaves, when the newcomer has to give way.
    """
    leaving: list[Sample] = []
    own = (must_finish(newcomer), worth(newcomer))
    while short > 0:
        sample = shelf.first()
        if sample is None or (must_finish(sample), worth(sample)) > own:
            for stays in leaving:
                shelf.push(stays)
            return None
        shelf.pop()
        leaving.append(sample)
        short -= gain(sample)
    return leaving
