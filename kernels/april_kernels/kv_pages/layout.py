"""The layout of a page's words, in the pool and in the page.

A *plane* is one (layer, K | V | latent) buffer of a KV pool, `[slots, heads, dim]`: MHA and MLA differ only in how
many planes there are and in their row size. A *row* is the data of one token in one plane. A page is one contiguous run
of int32 words, page-first, in SGLang's `page_unified` byte order (layer, then K before V, then token):

    page = plane 0: [page_tokens, row words] | plane 1: [page_tokens, row words] | …

so a page is one object to copy, to write to disk and to check, and K and V may have rows of different size. This module
ignores the dtype: bytes are moved, never converted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch

from april_kernels.kv_pages import blocks

WORD_BYTES = 4
VECTOR_BYTES = 16
"""The widest load and store of one thread, on NVIDIA and on AMD."""

KEY_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
"""Multipliers that derive the checksum's keys, one key per place in a page: 2**64 / golden ratio, and splitmix64's
first multiplier."""

_INT32_MAX = 2**31 - 1


class Packed(NamedTuple):
    """Pages and, where asked for, their checksums."""

    pages: torch.Tensor
    """int32 [pages, page words]."""
    sums: torch.Tensor | None
    """int64 [pages], the bits of an unsigned sum mod 2**64."""


@dataclass(frozen=True, eq=False)
class PlaneTable:
    """Addresses and strides of all planes of one pool. Build it once per pool; it keeps the buffers alive.

    Example:
        >>> k = [torch.zeros(1000, 8, 128, dtype=torch.bfloat16) for _ in range(36)]
        >>> v = [torch.zeros(1000, 8, 128, dtype=torch.bfloat16) for _ in range(36)]
        >>> PlaneTable.mha(k, v).page_words(16) * 4  # bytes of a page of 16 tokens
        2359296
    """

    buffers: tuple[torch.Tensor, ...]
    """As given: [slots, heads, dim], any dtype, rows contiguous."""
    planes: tuple[torch.Tensor, ...]
    """The same memory as int32 [slots, row words]."""
    row_words: tuple[int, ...]
    first_word: tuple[int, ...]
    """Words of one token before this plane: plane p begins at `page_tokens * first_word[p]` of a page."""
    token_words: int
    alignment: int
    """Bytes that every row's address and size are a multiple of: 16, 8 or 4."""
    rows: torch.Tensor
    """int64 [planes, 4] on the pool's device, what the kernel reads: address, then slot stride, row size and first
    word, these three in units of `alignment`. A device tensor, so that a launch costs no copy."""

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> "PlaneTable":
        """Planes in the order given.

        Raises:
            ValueError: buffers of different devices or slot counts, rows that are not contiguous or not whole words.
        """
        _check_buffers(buffers)
        planes = tuple(b.flatten(1).view(torch.int32) for b in buffers)
        row_words = tuple(p.shape[1] for p in planes)
        first_word = tuple(accumulate(row_words, initial=0))
        alignment = VECTOR_BYTES
        for plane in planes:
            alignment = gcd(alignment, plane.data_ptr(), WORD_BYTES * plane.stride(0), WORD_BYTES * plane.shape[1])
        words = alignment // WORD_BYTES
        rows = [
            [p.data_ptr(), p.stride(0) // words, p.shape[1] // words, first // words]
            for p, first in zip(planes, first_word, strict=False)
        ]
        table = torch.tensor(rows, dtype=torch.int64, device=planes[0].device)
        return cls(tuple(buffers), planes, row_words, first_word[:-1], first_word[-1], alignment, table)

    @classmethod
    def mha(cls, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> "PlaneTable":
        """A table of one K and one V buffer per layer, each `[slots, heads, dim]`; their row sizes may differ.

        Raises:
            ValueError: the numbers of K and V buffers differ, or as for `of`.
        """
        if len(k) != len(v):
            raise ValueError(f"as many K as V buffers are needed, got {len(k)} and {len(v)}")
        return cls.of([buffer for layer in zip(k, v, strict=True) for buffer in layer])

    @classmethod
    def mla(cls, latent: Sequence[torch.Tensor]) -> "PlaneTable":
        """One buffer per layer, `[slots, 1, dim]`, with the latent and the rope part side by side."""
        return cls.of(latent)

    @property
    def device(self) -> torch.device:
        return self.planes[0].device

    @property
    def slots(self) -> int:
        return self.planes[0].shape[0]

    def page_words(self, page_tokens: int) -> int:
        """Words of a page. Raises: ValueError: the page has too many words for the kernels' 32-bit offsets."""
        words = page_tokens * self.token_words
        if not 1 <= words <= _INT32_MAX:
            raise ValueError(f"a page of {page_tokens} tokens has {words} words; 1 to 2**31 - 1 are possible")
        return words

    def page_tokens(self, pages: torch.Tensor) -> int:
        """Tokens per page of `pages`, int32 [n, page words]. Raises: ValueError: pages do not hold whole tokens."""
        tokens, rest = divmod(pages.shape[1], self.token_words)
        if rest or not tokens:
            raise ValueError(f"a page of {pages.shape[1]} words does not hold whole tokens of {self.token_words} words")
        return tokens


def page_count(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens)


def checked_slots(device: torch.device, slots: torch.Tensor) -> torch.Tensor:
    """`slots` as int64 [tokens], contiguous. Raises: ValueError: wrong shape, dtype or device."""
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots must be int32 or int64 [tokens], got {slots.dtype} {list(slots.shape)}")
    if slots.device != device:
        raise ValueError(f"slots are on {slots.device}, the pool is on {device}")
    return slots.to(torch.int64).contiguous()


def checked_pages(device: torch.device, pages: torch.Tensor, n_pages: int, words: int) -> torch.Tensor:
    """`pages` unchanged: int32 [n_pages, words], each page contiguous, any stride between pages. Raises: ValueError."""
    if pages.dtype != torch.int32 or tuple(pages.shape) != (n_pages, words):
        raise ValueError(f"pages must be int32 [{n_pages}, {words}], got {pages.dtype} {list(pages.shape)}")
    if words > 1 and pages.stride(1) != 1:
        raise ValueError("the words of a page must be contiguous")
    if pages.device != device and not pages.is_pinned():
        raise ValueError(f"pages are on {pages.device}, the pool is on {device}; only pinned memory may differ")
    return pages


def pages_for(table: PlaneTable, slots: torch.Tensor, page_tokens: int, out: torch.Tensor | None) -> torch.Tensor:
    """`out`, checked, or new memory for the pages of `slots`; not initialised."""
    words = table.page_words(page_tokens)
    n_pages = page_count(slots.numel(), page_tokens)
    if out is None:
        return blocks.empty((n_pages, words), table.device)
    return checked_pages(table.device, out, n_pages, words)


def common_alignment(table: PlaneTable, pages: torch.Tensor) -> int:
    """Bytes that all rows, in the pool and in `pages`, are aligned to: 16, 8 or 4."""
    stride = WORD_BYTES * pages.stride(0) if pages.shape[0] > 1 else 0
    return gcd(table.alignment, pages.data_ptr(), stride)


def vector_words(pages: torch.Tensor) -> int:
    """Words that one access may move where `pages` are read front to back: 4, 2 or 1."""
    stride = pages.stride(0) if pages.shape[0] > 1 else 0
    return gcd(VECTOR_BYTES, pages.data_ptr(), WORD_BYTES * pages.shape[1], WORD_BYTES * stride) // WORD_BYTES


def _check_buffers(buffers: Sequence[torch.Tensor]) -> None:
    if not buffers:
        raise ValueError("a plane table needs at least one buffer")
    first = buffers[0]
    for i, buffer in enumerate(buffers):
        where = f"buffer {i}, {buffer.dtype} {list(buffer.shape)} on {buffer.device},"
        if buffer.ndim != 3:
            raise ValueError(f"{where} is not [slots, heads, dim]; head-major and page-major pools are not supported")
        if buffer.device != first.device or buffer.shape[0] != first.shape[0]:
            raise ValueError(f"{where} differs in device or slots from buffer 0 ({first.shape[0]} on {first.device})")
        if not buffer[0].is_contiguous() or buffer.stride(0) < buffer[0].numel():
            raise ValueError(f"{where} has rows that are not contiguous (strides {buffer.stride()})")
        sizes = (buffer[0].numel() * buffer.itemsize, buffer.stride(0) * buffer.itemsize, buffer.data_ptr())
        if any(size % WORD_BYTES for size in sizes) or not sizes[0]:
            raise ValueError(f"{where} has rows that are not whole {WORD_BYTES}-byte words")
