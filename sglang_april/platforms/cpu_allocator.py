"""KV slot allocators for the CPU platform."""

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


def make_allocator(
    size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """One slot at a time for pages of one token, else pages."""
    if page_size == 1 and not need_sort:
        return StackAllocator(size, dtype, device, kvcache, need_sort)
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


class StackAllocator(TokenToKVPoolAllocator):
    """SGLang's allocator with a stack of free slots: whoever frees pays for what is freed, not for all that is free.

    The parent makes a new list of all free slots for every free, megabytes in a large pool, and hands out the slot that
    has lain longest. Here it is the one freed last, whose KV is still in the processor's cache.
    """

    free_pages: torch.Tensor
    _slots: torch.Tensor
    """int64 [size]; the free ones are at its end, and `free_pages` is a view of them."""

    def clear(self) -> None:
        """All slots are free."""
        super().clear()
        self._slots = self.free_pages

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """int64 [need_size], or None if there are too few."""
        taken = super().alloc(need_size)
        return None if taken is None else taken.clone()  # the next free writes where they lay

    def free(self, free_index: torch.Tensor) -> None:
        """Slots that were taken, each once."""
        if not self.is_not_in_free_group:
            super().free(free_index)
            return
        top = len(self._slots) - len(self.free_pages)
        if free_index.numel() > top:
            raise ValueError(f"{free_index.numel()} slots are freed, and {top} are taken")
        self._slots[top - free_index.numel() : top] = free_index
        self.free_pages = self._slots[top - free_index.numel() :]


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
        if not self._take(num_new_pages):
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
        if not self._take(num_new_pages):
            return None
        slots = last_loc.to(torch.int64) + 1
        slots[opens_page] = self.free_pages[:num_new_pages].to(torch.int64) * self.page_size
        self.free_pages = self.free_pages[num_new_pages:]
        return slots

    def _take(self, pages: int) -> bool:
        if self.need_sort and pages > len(self.free_pages):
            self.merge_and_sort_free()
        return pages <= len(self.free_pages)
