"""The layout of int8 pages: the offsets of each plane's codes and scales, and the tables that the kernels read.

A page is `codes | scales`, one contiguous run of int32 words like a raw page, so that it is copied, stored and
checked in the same way:

    codes int8 [plane, page_tokens, heads, dim] | scales float32 [plane, page_tokens, heads] | zeros up to 16 bytes
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch

from april_kernels.kv_pages import layout
from april_kernels.kv_pages.layout import PlaneTable

LEVELS = 127.0
"""Largest magnitude of a code."""
SMALLEST = 1e-30
"""Heads whose max|x| is below this become zero: 127 / max|x| could overflow."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Planes of equal (heads, dim), which one kernel launch covers."""

    heads: int
    dim: int
    members: tuple[int, ...]
    """Indices of its planes in the table."""
    rows: torch.Tensor
    """int64 [members, 4] on the pool's device: address; slot stride in units of the pool's alignment; offset of the
    plane's codes per token, in `code_unit`s; offset of its scales per token, in words."""


@dataclass(frozen=True, eq=False)
class Int8Layout:
    """The int8 layout of one pool. Build it once per pool, like the plane table.

    Raises:
        ValueError: planes of different or unsupported dtypes, or rows that are not whole 4-byte words of codes.
    """

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
        """Words of codes and scales in a page, without the padding."""
        return page_tokens * (self.token_codes // layout.WORD_BYTES + self.token_scales)

    def page_words(self, page_tokens: int) -> int:
        """Words of a page, a multiple of 16 bytes."""
        return -(-self.used_words(page_tokens) // 4) * 4

    @cached_property
    def code_unit(self) -> int:
        """Alignment in bytes of the start of each plane's codes: 16 where the rows allow it."""
        return gcd(layout.VECTOR_BYTES, *(heads * dim for heads, dim in self.shapes))

    @cached_property
    def groups(self) -> list[HeadGroup]:
        """The planes by (heads, dim)."""
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


def sections(layout_: Int8Layout, pages: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the codes, int8 [pages, bytes], and of the scales, float32 [pages, words], of `pages`."""
    code_words = page_tokens * layout_.token_codes // layout.WORD_BYTES
    codes = pages[:, :code_words].view(torch.int8)
    return codes, pages[:, code_words : code_words + page_tokens * layout_.token_scales].view(torch.float32)
