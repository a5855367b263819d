"""Lossy pages, for those who ask for them: int8 codes with one scale per token and head. Off unless called.

A page is `codes | scales`, one contiguous run of int32 words like a lossless page (copy, store and check it alike):
codes int8 `[plane, page_tokens, heads, dim]`, scales float32 `[plane, page_tokens, heads]`, zeros up to 16 bytes.

Error: a code is the value over `max|x| / 127` of its head, rounded to the nearest integer (halves away from zero), so
a restored value is off by at most `max|x| / 254`, plus the rounding of the pool's dtype. For normally distributed heads
of 128 that is 0.65 % of their root mean square (tests/kernels/cases_int8.py measures it). Resuming on such pages is not
invisible. Values must be finite; heads whose largest value is below 1e-30 become zero.

With bfloat16 heads of 128, a page has 0.52 of the bytes.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from types import ModuleType

import torch

from april_kernels.kv_pages import blocks, layout
from april_kernels.kv_pages.layout import PlaneTable

LEVELS = 127.0
SMALLEST = 1e-30
"""Below it, 127 / max|x| could overflow."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Planes of one (heads, dim), which one launch covers."""

    heads: int
    dim: int
    members: tuple[int, ...]
    """Which planes of the table."""
    rows: torch.Tensor
    """int64 [members, 4] on the pool's device: address; slot stride in units of the pool's alignment; where the plane's
    codes begin, per token and in `code_unit`s; where its scales begin, per token and in words."""


@dataclass(frozen=True, eq=False)
class Int8Pages:
    """How a pool's pages look in int8; build it once per pool, like the plane table."""

    table: PlaneTable

    def __post_init__(self) -> None:
        dtypes = {buffer.dtype for buffer in self.table.buffers}
        if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
            raise ValueError(f"int8 pages need one dtype of {_DTYPES}, the pool has {sorted(map(str, dtypes))}")
        if any(heads * dim % layout.WORD_BYTES for heads, dim in self.shapes):
            raise ValueError(
                f"int8 rows must be whole words: heads x dim of every plane a multiple of 4, {self.shapes}"
            )

    @property
    def dtype(self) -> torch.dtype:
        return self.table.buffers[0].dtype

    @cached_property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, dim) of each plane."""
        return tuple((b.shape[1], b.shape[2]) for b in self.table.buffers)

    @cached_property
    def token_codes(self) -> int:
        """Bytes of one token's codes."""
        return sum(heads * dim for heads, dim in self.shapes)

    @cached_property
    def token_scales(self) -> int:
        """Words of one token's scales."""
        return sum(heads for heads, _ in self.shapes)

    def used_words(self, page_tokens: int) -> int:
        return page_tokens * (self.token_codes // layout.WORD_BYTES + self.token_scales)

    def page_words(self, page_tokens: int) -> int:
        return -(-self.used_words(page_tokens) // 4) * 4

    @cached_property
    def code_unit(self) -> int:
        """Bytes that every plane's codes begin at a multiple of: 16 where rows allow it."""
        return gcd(layout.VECTOR_BYTES, *(heads * dim for heads, dim in self.shapes))

    @cached_property
    def groups(self) -> list[HeadGroup]:
        starts, codes, scales = [], 0, 0
        for heads, dim in self.shapes:
            starts.append((codes // self.code_unit, scales))
            codes, scales = codes + heads * dim, scales + heads
        groups = []
        for heads, dim in dict.fromkeys(self.shapes):
            members = tuple(i for i, shape in enumerate(self.shapes) if shape == (heads, dim))
            buffers = self.table.buffers
            unit = self.table.alignment // self.dtype.itemsize
            rows = [[buffers[i].data_ptr(), buffers[i].stride(0) // unit, *starts[i]] for i in members]
            table = torch.tensor(rows, dtype=torch.int64, device=self.table.device)
            groups.append(HeadGroup(heads, dim, members, table))
        return groups


def pack(layout_: Int8Pages, slots: torch.Tensor, page_tokens: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rows of `slots`, quantised: int32 [pages, layout_.page_words(page_tokens)]. Slots as for lossless pages."""
    slots = layout.checked_slots(layout_.table.device, slots)
    n_pages, words = layout.page_count(slots.numel(), page_tokens), layout_.page_words(page_tokens)
    if out is None:
        out = blocks.empty((n_pages, words), layout_.table.device)
    layout.checked_pages(layout_.table.device, out, n_pages, words)
    if slots.numel():
        out[:, layout_.used_words(page_tokens) :] = 0
        _implementation(layout_).quantise(layout_, slots, page_tokens, out)
    return out


def unpack(layout_: Int8Pages, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Pages of `pack` back into the rows of `slots`, in the pool's dtype. `page_tokens` as they were packed with."""
    slots = layout.checked_slots(layout_.table.device, slots)
    n_pages = layout.page_count(slots.numel(), page_tokens)
    layout.checked_pages(layout_.table.device, pages, n_pages, layout_.page_words(page_tokens))
    if slots.numel():
        _implementation(layout_).restore(layout_, slots, page_tokens, pages)


def sections(layout_: Int8Pages, pages: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes int8 [pages, bytes] and the scales float32 [pages, words] of `pages`, as views."""
    code_words = page_tokens * layout_.token_codes // layout.WORD_BYTES
    codes = pages[:, :code_words].view(torch.int8)
    return codes, pages[:, code_words : code_words + page_tokens * layout_.token_scales].view(torch.float32)


def _implementation(layout_: Int8Pages) -> ModuleType:
    if layout_.table.device.type == "cpu":
        from april_kernels.kv_pages import int8_reference

        return int8_reference
    from april_kernels.kv_pages import int8_triton

    return int8_triton
