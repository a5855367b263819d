"""KV pages: token slots of all layers out of a pool into page-first pages, and back.

    table = PlaneTable.mha(k_buffers, v_buffers)      # once per pool; or PlaneTable.mla(latent_buffers)
    pages, sums = pack(table, slots, page_tokens=16, checksum=True)
    unpack(table, new_slots, pages)

Pools on a GPU (CUDA or ROCm) are moved by Triton kernels, asynchronously on the current stream; pools in CPU memory by
plain torch, before the call returns. Both write the same bytes. `int8` holds the opt-in lossy pages.
"""

from types import ModuleType

import torch

from april_kernels.kv_pages import reference
from april_kernels.kv_pages.layout import Packed, PlaneTable, page_count

__all__ = ["Packed", "PlaneTable", "checksum", "pack", "page_count", "unpack", "warm_up"]


def pack(
    table: PlaneTable,
    slots: torch.Tensor,
    page_tokens: int,
    *,
    out: torch.Tensor | None = None,
    checksum: bool = False,
    programs: int | None = None,
) -> Packed:
    """Copy the rows of `slots` into pages.

    Args:
        slots: int32 or int64 [tokens] on the pool's device, in any order. Negative: padding. Token i goes to place
            `i % page_tokens` of page `i // page_tokens`; the last page may be partial.
        out: int32 [page_count(tokens, page_tokens), table.page_words(page_tokens)] to write to, aligned like the pool;
            pages may be strided. New memory by default. Every word is written: places without a token become zero.
        checksum: also return the pages' checksums; on a GPU they are summed while the words pass through.
        programs: on a GPU, the maximum number of programs, which limits the SMs taken from concurrent work.

    Raises:
        ValueError: a shape, dtype, device or alignment does not fit; the message names it.
        IndexError: a slot is beyond the pool (CPU). A GPU treats such a slot as padding, because reporting it would
            need a synchronisation.
    """
    if table.device.type == "cpu":
        return reference.pack(table, slots, page_tokens, out=out, checksum=checksum)
    return _triton().pack(table, slots, page_tokens, out=out, checksum=checksum, programs=programs)


def unpack(table: PlaneTable, slots: torch.Tensor, pages: torch.Tensor, *, programs: int | None = None) -> None:
    """Copy pages into the rows of `slots`: the inverse of `pack`, into the same slots or others.

    Args:
        slots: as for `pack`; each at most once (with repeats it is undefined which token stays). Places whose slot is
            negative are left out, and no other row of the pool is written.
        pages: int32 [page_count(tokens, page_tokens), page words], aligned like the pool; `page_tokens` follows from
            the words of a page.
    """
    if table.device.type == "cpu":
        reference.unpack(table, slots, pages)
    else:
        _triton().unpack(table, slots, pages, programs=programs)


def checksum(pages: torch.Tensor) -> torch.Tensor:
    """int64 [pages]: per page, its words' hashes summed mod 2**64. For a page written by `pack` or by `int8.pack`.

    A word's hash is `z ^ z >> 32` with `z = (key ^ word) * key` mod 2**64 and an odd 64-bit key for its place in the
    page, so a page with any one word changed never has the same sum. The sum does not depend on order, hence not on
    how a kernel splits the page. It detects damage, not forgery.

    Args:
        pages: int32 [pages, words], words of a page contiguous, on any device.

    Raises:
        ValueError: `pages` has another shape, dtype or layout.
    """
    if pages.ndim != 2 or pages.dtype != torch.int32 or (pages.shape[1] > 1 and pages.stride(1) != 1):
        raise ValueError(f"pages must be int32 [pages, words], words contiguous, got {pages.dtype} {list(pages.shape)}")
    return reference.checksum(pages) if pages.device.type == "cpu" else _triton().checksum(pages)


def warm_up(table: PlaneTable, page_tokens: int) -> None:
    """Compile for this pool and page size, before the first round. Does not change the pool; a no-op on a CPU."""
    if table.device.type != "cpu":
        _triton().warm_up(table, page_tokens)


def _triton() -> ModuleType:
    # Imported where it is needed: a CPU installation of torch has no Triton.
    from april_kernels.kv_pages import triton_impl

    return triton_impl
