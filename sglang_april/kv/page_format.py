"""The format of pages outside the pool: the pool's own bytes, or int8 codes (opt-in, lossy)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from april_kernels import kv_pages
from april_kernels.kv_pages import PlaneTable, int8
from april_kernels.kv_pages.int8_layout import Int8Layout


class PageFormat(Protocol):
    """Pages of one pool, int32 [n, page_words]; `slots` is int64 [tokens], on the pool's device."""

    @property
    def name(self) -> str:
        """The value of `--april-kv-pages`; also part of the layout string in the header of every file."""

    @property
    def table(self) -> PlaneTable: ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_words(self) -> int: ...

    def pack(self, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy the rows of `slots` into the pages `out`, on the pool's device; returns checksums, int64 [n]."""

    def unpack(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy `pages` into the rows of `slots`."""

    def warm_up(self) -> None:
        """Compile the GPU kernels ahead of the first round; the pool is not changed."""


@dataclass(frozen=True, eq=False)
class RawPages:
    """The pool's own bytes."""

    table: PlaneTable
    page_tokens: int
    name = "full"

    @cached_property
    def page_words(self) -> int:
        return self.table.page_words(self.page_tokens)

    def pack(self, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        sums = kv_pages.pack(self.table, slots, self.page_tokens, out=out, checksum=True).sums
        assert sums is not None
        return sums

    def unpack(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        kv_pages.unpack(self.table, slots, pages)

    def warm_up(self) -> None:
        kv_pages.warm_up(self.table, self.page_tokens)


@dataclass(frozen=True, eq=False)
class QuantizedPages:
    """int8 codes with one scale per token and head: lossy, about half the bytes of a 16-bit pool.

    Checksums cover codes and scales.

    Raises:
        ValueError: the pool's dtype is not bfloat16, float16 or float32.
    """

    table: PlaneTable
    page_tokens: int
    name = "int8"

    def __post_init__(self) -> None:
        assert self._layout

    @cached_property
    def _layout(self) -> Int8Layout:
        return Int8Layout(self.table)

    @cached_property
    def page_words(self) -> int:
        return self._layout.page_words(self.page_tokens)

    def pack(self, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return kv_pages.checksum(int8.pack(self._layout, slots, self.page_tokens, out=out))

    def unpack(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        int8.unpack(self._layout, slots, self.page_tokens, pages)

    def warm_up(self) -> None:
        if self.table.device.type != "cpu":
            padding = torch.full((self.page_tokens,), -1, dtype=torch.int64, device=self.table.device)
            pages = torch.empty((1, self.page_words), dtype=torch.int32, device=self.table.device)
            self.pack(padding, pages)
            self.unpack(padding, pages)


PAGE_FORMATS: dict[str, type[RawPages] | type[QuantizedPages]] = {cls.name: cls for cls in (RawPages, QuantizedPages)}
