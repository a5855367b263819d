"""KV slot allocators for the CPU platform."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages

from april_kernels.compiled import compiled

Bits = NDArray[np.bool_]
Ints = NDArray[np.int64]


def make_allocator(
    size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """One slot at a time for pages of one token, else pages."""
    if page_size == 1 and not need_sort:
        return SweepAllocator(size, dtype, device, kvcache, need_sort)
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


class SweepAllocator(TokenToKVPoolAllocator):
    """SGLang's allocator with a flag per slot. It sweeps over the pool cyclically and takes free slots in order.

    Slots allocated together are mostly adjacent, so decode attention reads in order. The parent returns slots in the
    order in which they were freed: after a while the slots of a step are scattered, and attention takes 1.5 times as
    long (64 rows of 90 tokens) or more. It also copies the whole free list at every free, megabytes in a large pool.
    """

    @property
    def free_pages(self) -> torch.Tensor:
        """int64: the free slots, ascending."""
        return torch.from_numpy(np.flatnonzero(~self._taken))

    @free_pages.setter
    def free_pages(self, slots: torch.Tensor | None) -> None:
        # Slot 0 takes the writes of padding.
        self._taken = np.ones(self.size + 1, np.bool_)
        self._at, self._free = 1, 0
        if slots is not None:
            self._taken[slots.numpy()] = False
            self._free = slots.numel()

    def available_size(self) -> int:
        """Free slots."""
        return self._free

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """int64 [need_size], or None if there are too few."""
        if need_size > self._free:
            return None
        slots = torch.empty(need_size, dtype=torch.int64)
        self._at = int(_take(self._taken, self._at, slots.numpy()))
        self._free -= need_size
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        """Free slots, int [n].

        Raises:
            ValueError: a slot was not taken, or occurs twice.
        """
        # Before 0.5.23 `free_group` is always a list.
        if not getattr(self, "is_not_in_free_group", self.free_group is None):
            super().free(free_index)
            return
        freed = int(_release(self._taken, free_index.long().contiguous().numpy()))
        self._free += freed
        if freed < free_index.numel():
            raise ValueError(f"{free_index.numel()} slots were freed, but only {freed} of them were allocated")


@compiled("i8(b1[::1], i8, i8[::1])")
def _take(taken: Bits, at: int, slots: Ints) -> int:
    """Take free slots from `at` on, wrapping around; there must be enough. Returns the position of the next sweep."""
    for i in range(slots.shape[0]):
        while at >= taken.shape[0] or taken[at]:
            at = at + 1 if at < taken.shape[0] else 0
        taken[at] = True
        slots[i] = at
        at += 1
    return at


@compiled("i8(b1[::1], i8[::1])")
def _release(taken: Bits, slots: Ints) -> int:
    """Unmark slots; returns how many of them were marked."""
    count = 0
    for slot in slots:
        count += taken[slot] and slot > 0
        taken[slot] = slot == 0
    return count


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator with its two Triton kernels written in PyTorch."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for a prefill: the rest of each last page, then new pages; None if there are too few."""
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._ensure_free(num_new_pages):
            return None
        slots = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot for each request: beside its last one, or at the start of a new page."""
        opens_page = (seq_lens - 1) % self.page_size == 0
        num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self._ensure_free(num_new_pages):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[opens_page] = self.free_pages[:num_new_pages].to(torch.int64) * self.page_size
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def _ensure_free(self, pages: int) -> bool:
        if self.need_sort and pages > len(self.free_pages):
            self.merge_and_sort_free()
        return pages <= len(self.free_pages)
