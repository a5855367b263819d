"""int8 pages in plain torch: the CPU path, and the oracle of the Triton kernel. Call `int8.pack` and `int8.unpack`."""

from collections.abc import Iterator

import torch

from april_kernels.kv_pages import int8
from april_kernels.kv_pages.int8 import Int8Pages


def quantise(layout: Int8Pages, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Fill the codes and the scales of `pages`; padding gets zeros."""
    tokens, live = _places(slots, page_tokens, pages.shape[0])
    for buffer, codes, scales in _planes(layout, page_tokens, pages):
        x = buffer[tokens].to(torch.float32)
        x[~live] = 0
        largest = x.abs().amax(dim=-1)
        y = x * torch.where(largest > int8.SMALLEST, int8.LEVELS / largest, 0.0)[..., None]
        codes.copy_((y + torch.where(y >= 0, 0.5, -0.5)).to(torch.int8))
        scales.copy_(torch.where(largest > int8.SMALLEST, largest / int8.LEVELS, 0.0))


def restore(layout: Int8Pages, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Write the rows of live slots, rounded to the pool's dtype."""
    tokens, live = _places(slots, page_tokens, pages.shape[0])
    for buffer, codes, scales in _planes(layout, page_tokens, pages):
        x = codes.to(torch.float32) * scales[..., None]
        buffer[tokens[live]] = x[live].to(buffer.dtype)


def _places(slots: torch.Tensor, page_tokens: int, n_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[pages, page_tokens]: a slot of the pool for every place, and whether the place has a token."""
    grid = torch.nn.functional.pad(slots, (0, n_pages * page_tokens - slots.numel()), value=-1).view(-1, page_tokens)
    return grid.clamp(min=0), grid >= 0


def _planes(
    layout: Int8Pages, page_tokens: int, pages: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per plane its buffer, its codes [pages, page_tokens, heads, dim] and its scales [pages, page_tokens, heads]."""
    codes, scales = int8.sections(layout, pages, page_tokens)
    code, scale = 0, 0
    for buffer, (heads, dim) in zip(layout.table.buffers, layout.shapes, strict=True):
        code_end, scale_end = code + page_tokens * heads * dim, scale + page_tokens * heads
        yield (
            buffer,
            codes[:, code:code_end].unflatten(1, (page_tokens, heads, dim)),
            scales[:, scale:scale_end].unflatten(1, (page_tokens, heads)),
        )
        code, scale = code_end, scale_end
