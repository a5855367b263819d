"""SGLang's KV pool for the CPU platform, on huge pages.

A decode step reads some hundred bytes per token. In a large pool that has been in use for a while each token is on a
different memory page, and the TLB misses take as long as the rest of decode attention.
"""

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from april_kernels.kv_pages import blocks


class HugePagesPool(MHATokenToKVPool):
    """SGLang's pool with its large buffers on huge pages, where the system has them."""

    def _create_buffers_normal(self) -> None:
        super()._create_buffers_normal()
        for buffers in (self.k_buffer, self.v_buffer):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = on_huge_pages(buffer)


def on_huge_pages(zeros: torch.Tensor) -> torch.Tensor:
    """Zeros of the same shape and dtype on huge pages; the argument itself if it is small."""
    if zeros.nbytes < blocks.FRESH_BYTES:
        return zeros
    memory = blocks.empty((-(-zeros.nbytes // 4),)).zero_()
    return memory.view(torch.uint8)[: zeros.nbytes].view(zeros.dtype).view(zeros.shape)
