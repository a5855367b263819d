"""int8 pages in plain torch: the CPU path and the reference for the Triton kernel, behind `int8.pack` and `unpack`."""

from collections.abc import Iterator

import torch

from april_kernels.kv_pages import int8_layout
from april_kernels.kv_pages.int8_layout import Int8Layout


def quantize(layout: Int8Layout, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Write the codes and scales of `pages`; padding becomes zero."""
    tokens, live = _slot_grid(slots, page_tokens, pages.shape[0])
    for buffer, codes, scales in _plane_views(layout, page_tokens, pages):
        x = buffer[tokens].to(torch.float32)
        x[~live] = 0
        largest = x.abs().amax(dim=-1)
        y = x * torch.where(largest > int8_layout.SMALLEST, int8_layout.LEVELS / largest, 0.0)[..., None]
        codes.copy_((y + torch.where(y >= 0, 0.5, -0.5)).to(torch.int8))
        scales.copy_(torch.where(largest > int8_layout.SMALLEST, largest / int8_layout.LEVELS, 0.0))


def dequantize(layout: Int8Layout, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Write the rows of the slots that are not padding, rounded to the pool's dtype."""
    tokens, live = _slot_grid(slots, page_tokens, pages.shape[0])
    for buffer, codes, scales in _plane_views(layout, page_tokens, pages):
        x = codes.to(torch.float32) * scales[..., None]
        buffer[tokens[live]] = x[live].to(buffer.dtype)


def _slot_grid(slots: torch.Tensor, page_tokens: int, n_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slot of every token place, 0 for padding; whether the place has a token), both [pages, page_tokens]."""
    grid = torch.nn.functional.pad(slots, (0, n_pages * page_tokens - slots.numel()), value=-1).view(-1, page_tokens)
    return grid.clamp(min=0), grid >= 0


def _plane_views(
    layout: Int8Layout, page_tokens: int, pages: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per plane: its buffer, its codes [pages, page_tokens, heads, dim] and its scales [pages, page_tokens, heads]."""
    codes, scales = int8_layout.sections(layout, pages, page_tokens)
    code, scale = 0, 0
    for buffer, (heads, dim) in zip(layout.table.buffers, layout.shapes, strict=True):
        code_end, scale_end = code + page_tokens * heads * dim, scale + page_tokens * heads
        yield (
            buffer,
            codes[:, code:code_end].unflatten(1, (page_tokens, heads, dim)),
            scales[:, scale:scale_end].unflatten(1, (page_tokens, heads)),
        )
        code, scale = code_end, scale_end
