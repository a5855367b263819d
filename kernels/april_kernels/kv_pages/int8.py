"""Lossy int8 pages, opt-in: int8 codes with one float32 scale per token and head. `int8_layout` has the layout.

Error: a code is the value divided by `max|x| / 127` of its head, rounded to the nearest integer (halves away from
zero), so a restored value is off by at most `max|x| / 254`, plus the rounding of the pool's dtype. For normally
distributed heads of 128 that is 0.65 % of their root mean square (measured by tests/kernels/cases_int8.py). A resume on
such pages is not exact. Values must be finite; heads whose largest magnitude is below 1e-30 become zero.

With bfloat16 heads of 128, a page has 0.52 of the bytes of a raw page.
"""

from types import ModuleType

import torch

from april_kernels.kv_pages import blocks, layout
from april_kernels.kv_pages.int8_layout import Int8Layout


def pack(
    layout_: Int8Layout, slots: torch.Tensor, page_tokens: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantize the rows of `slots` into pages.

    Args:
        slots: as for `april_kernels.kv_pages.pack`.
        out: int32 [page_count(tokens, page_tokens), layout_.page_words(page_tokens)]; new memory by default.

    Returns:
        `out`, or the new pages.

    Raises:
        ValueError: shapes, dtypes, devices or alignment do not fit.
    """
    slots = layout.checked_slots(layout_.table.device, slots)
    n_pages, words = layout.page_count(slots.numel(), page_tokens), layout_.page_words(page_tokens)
    if out is None:
        out = blocks.empty((n_pages, words), layout_.table.device)
    layout.checked_pages(layout_.table.device, out, n_pages, words)
    if slots.numel():
        out[:, layout_.used_words(page_tokens) :] = 0
        _implementation(layout_).quantize(layout_, slots, page_tokens, out)
    return out


def unpack(layout_: Int8Layout, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Dequantize `pages` into the rows of `slots`, in the pool's dtype: the approximate inverse of `pack`.

    Args:
        page_tokens: the value the pages were packed with.

    Raises:
        ValueError: shapes, dtypes, devices or alignment do not fit.
    """
    slots = layout.checked_slots(layout_.table.device, slots)
    n_pages = layout.page_count(slots.numel(), page_tokens)
    layout.checked_pages(layout_.table.device, pages, n_pages, layout_.page_words(page_tokens))
    if slots.numel():
        _implementation(layout_).dequantize(layout_, slots, page_tokens, pages)


def _implementation(layout_: Int8Layout) -> ModuleType:
    if layout_.table.device.type == "cpu":
        from april_kernels.kv_pages import int8_reference

        return int8_reference
    from april_kernels.kv_pages import int8_triton

    return int8_triton
