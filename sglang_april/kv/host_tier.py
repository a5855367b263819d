"""The host tier of one rank: an arena of pages under a byte cap.

Pages are allocated in ranges of neighbours, so that each range is one large copy. The worker thread allocates memory
slab by slab on first use: pinning a large arena at start would take minutes. Pinned memory comes from
`torch.empty(pin_memory=True)`, because on ROCm memory registered afterwards has a different address on the device.
Pageable memory uses huge pages where available, so that first copies do not pay for page faults.
"""

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import torch

from april_kernels.kv_pages import blocks

SLAB_BYTES = 256 << 20
"""Bytes allocated at a time."""
PINNED_SLAB_BYTES = 32 << 20
"""The same for pinned memory: the driver lets no other thread of the process launch work meanwhile."""


def pinned_slab_pages(page_bytes: int) -> int:
    """Pages of a pinned slab: at most an eighth of what torch pins is not used.

    torch rounds each pinned block up to a power of two (`CachingHostAllocator.h`), so large pages need larger slabs.
    """
    block = PINNED_SLAB_BYTES
    while block % page_bytes > block // 8:
        block *= 2
    return block // page_bytes


class PageRange(NamedTuple):
    """Adjacent pages of one slab."""

    start: int
    size: int


@dataclass(slots=True)
class HostPages:
    """Pages of one copy in the host arena. With a `prefix`, the sample's first tokens are stored under that number."""

    ranges: list[PageRange]
    checksums: torch.Tensor
    """int64 [pages]."""
    prefix: int | None = None


class HostArena:
    """Memory for int32 [pages, page_words]. Not thread-safe: the page store uses it from its worker thread only."""

    def __init__(self, pages: int, page_words: int, *, pinned: bool) -> None:
        self.page_words, self.pinned = page_words, pinned
        page_bytes = 4 * page_words
        self._slab = pinned_slab_pages(page_bytes) if pinned else max(1, SLAB_BYTES // page_bytes)
        self._slabs: dict[int, torch.Tensor] = {}
        self._pages = pages
        self._free = [PageRange(i, min(self._slab, pages - i)) for i in range(0, pages, self._slab)]
        self.free_pages = pages

    def allocate(self, pages: int) -> list[PageRange]:
        """Allocate pages, in as few ranges as the free list allows.

        Raises:
            MemoryError: the arena is full, or no memory is left for another slab; nothing is allocated.
        """
        if pages > self.free_pages:
            raise MemoryError(f"the host tier has {self.free_pages} free pages, {pages} are needed")
        ranges: list[PageRange] = []
        self.free_pages -= pages
        try:
            while pages:
                start, count = self._free[0]
                allocated = PageRange(start, min(count, pages))
                self._ensure_slab(allocated)
                if allocated.size == count:
                    self._free.pop(0)
                else:
                    self._free[0] = PageRange(start + allocated.size, count - allocated.size)
                ranges.append(allocated)
                pages -= allocated.size
        except (RuntimeError, MemoryError) as error:
            self.free_pages += pages
            self.free(ranges)
            raise MemoryError(f"the host tier cannot grow: {error}") from error
        return ranges

    def free(self, ranges: list[PageRange]) -> None:
        """Free ranges that `allocate` returned, and merge them with adjacent free ranges."""
        for page_range in ranges:
            self.free_pages += page_range.size
            i = bisect.bisect_left(self._free, page_range)
            start, end = page_range.start, page_range.start + page_range.size
            if i < len(self._free) and self._free[i].start == end and end % self._slab:
                end += self._free.pop(i).size
            if i and sum(self._free[i - 1]) == start and start % self._slab:
                i -= 1
                start = self._free.pop(i).start
            self._free.insert(i, PageRange(start, end - start))

    def pages(self, page_range: PageRange) -> torch.Tensor:
        """A view of the range: int32 [page_range.size, page_words]."""
        first = page_range.start % self._slab
        return self._slabs[page_range.start // self._slab][first : first + page_range.size]

    def _ensure_slab(self, page_range: PageRange) -> None:
        number = page_range.start // self._slab
        if number not in self._slabs:
            # The last slab may be smaller.
            shape = (min(self._slab, self._pages - number * self._slab), self.page_words)
            slab = torch.empty(shape, dtype=torch.int32, pin_memory=True) if self.pinned else blocks.empty(shape)
            self._slabs[number] = slab
