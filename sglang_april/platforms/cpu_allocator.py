"""KV slot allocators for the CPU platform."""

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


def make_allocator(
    size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
    """One slot at a time for pages of one token, else pages."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, device, kvcache, need_sort)
    return TorchPagedAllocator(size, page_size, dtype, device, kvcache, need_sort)


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
