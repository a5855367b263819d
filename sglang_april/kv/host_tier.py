"""Step 5 of 9 (store): the host tier of one rank, an arena of pages under a byte cap.

Pages are handed out in runs of neighbours, so that a run is one large copy. Memory is allocated slab by slab when it is
first needed, by the rank's worker: pinning all of a large arena at start would take minutes. Pinned memory comes from
`torch.empty(pin_memory=True)`: on ROCm, memory that is registered afterwards has another address on the device. Plain
memory is on huge pages where there are any, so that the first copies do not wait for page faults.
"""

import bisect
from typing import NamedTuple

import torch

from april_kernels.kv_pages import blocks

SLAB_BYTES = 256 << 20


class PageRange(NamedTuple):
    """Neighbouring pages of one slab."""

    start: int
    size: int


class HostArena:
    """int32 [pages, page_words]; used by one thread."""

    def __init__(self, pages: int, page_words: int, *, pinned: bool) -> None:
        self.page_words, self.pinned = page_words, pinned
        self._slab = max(1, SLAB_BYTES // (4 * page_words))
        self._slabs: dict[int, torch.Tensor] = {}
        self._pages = pages
        self._free = [PageRange(i, min(self._slab, pages - i)) for i in range(0, pages, self._slab)]
        self.free_pages = pages

    def take(self, pages: int) -> list[PageRange]:
        """Room for so many pages, in few runs.

        Raises:
            MemoryError: the arena is full, or the machine has no memory for another slab; nothing is taken.
        """
        if pages > self.free_pages:
            raise MemoryError(f"the host tier has {self.free_pages} free pages, {pages} are needed")
        runs: list[PageRange] = []
        self.free_pages -= pages
        try:
            while pages:
                start, count = self._free[0]
                took = PageRange(start, min(count, pages))
                self._ensure(took)
                if took.size == count:
                    self._free.pop(0)
                else:
                    self._free[0] = PageRange(start + took.size, count - took.size)
                runs.append(took)
                pages -= took.size
        except (RuntimeError, MemoryError) as error:
            self.free_pages += pages
            self.give(runs)
            raise MemoryError(f"the host tier cannot grow: {error}") from error
        return runs

    def give(self, runs: list[PageRange]) -> None:
        """Take back what `take` gave."""
        for run in runs:
            self.free_pages += run.size
            i = bisect.bisect_left(self._free, run)
            start, end = run.start, run.start + run.size
            if i < len(self._free) and self._free[i].start == end and end % self._slab:
                end += self._free.pop(i).size
            if i and sum(self._free[i - 1]) == start and start % self._slab:
                i -= 1
                start = self._free.pop(i).start
            self._free.insert(i, PageRange(start, end - start))

    def pages(self, run: PageRange) -> torch.Tensor:
        """int32 [run.size, page_words], the memory itself."""
        first = run.start % self._slab
        return self._slabs[run.start // self._slab][first : first + run.size]

    def _ensure(self, run: PageRange) -> None:
        number = run.start // self._slab
        if number not in self._slabs:
            # The last one, or the only one of a small arena, has fewer pages.
            shape = (min(self._slab, self._pages - number * self._slab), self.page_words)
            slab = torch.empty(shape, dtype=torch.int32, pin_memory=True) if self.pinned else blocks.empty(shape)
            self._slabs[number] = slab
