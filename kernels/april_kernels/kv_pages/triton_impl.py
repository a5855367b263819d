# ruff: noqa: ANN001, ANN201, ANN202, N803 (Triton's own conventions: arguments by comment, constexpr in capitals)
# mypy: disable-error-code=no-untyped-def
"""Pages on a GPU: one Triton kernel packs and unpacks all planes in one launch, the same source for CUDA and ROCm.

Bytes are moved as int32 words in a `[chunks, words of a chunk]` tile, one 16-byte chunk per thread and access. Three
things keep accesses that wide (checked on the compiled code of every target, tests/kernels/test_compile.py): every
address is a number of chunks times the chunk, never a number of words; the alignment hint is on the pointer, after
the cast from the table's integer; and a tile has at least a chunk per thread.

Slots and pages number in the millions and rows in kilobytes, so products are taken in int64. Loads skip L1 (`.cg`) and
stores are marked as streaming (`.cs`): nothing is read twice.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from april_kernels.kv_pages import layout
from april_kernels.kv_pages.layout import Packed, PlaneTable

_KEY_A: tl.constexpr = tl.constexpr(layout.KEY_MULTIPLIERS[0])
_KEY_B: tl.constexpr = tl.constexpr(layout.KEY_MULTIPLIERS[1])

_MAX_TILE_WORDS = 4096
"""16 KB: four accesses in flight per thread of 8 warps of 32."""
_MIN_TILE_WORDS = 256
"""One access of every thread in the narrowest launch, a warp of 64."""
_PROGRAMS_PER_SM = 8

_NOT_SPECIALIZED = ("n_slots", "n_tokens", "n_pages", "n_planes", "page_stride", "page_chunks")
"""Arguments that vary from call to call: specializing on their values would compile again in the middle of a round."""


@triton.jit
def _tile_sum(words, first_word, inside, VEC: tl.constexpr):
    """Sum of the mixed words of a tile, as in `reference.checksum`.

    Args:
        words: int32 [chunks, VEC].
        first_word: int32 [chunks], index of each chunk's first word within its page.
        inside: bool [chunks], which chunks count.
    """
    index = first_word[:, None] + tl.arange(0, VEC)[None, :]
    key = (index.to(tl.uint64) + 1) * _KEY_A
    key = (key ^ (key >> 32)) * _KEY_B
    key = (key ^ (key >> 32)) | 1
    mixed = (key ^ words.to(tl.uint32, bitcast=True).to(tl.uint64)) * key
    mixed = (mixed ^ (mixed >> 32)).to(tl.int64, bitcast=True)
    return tl.sum(tl.ravel(tl.where(inside[:, None], mixed, 0)), axis=0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=("slots_ptr", "sums_ptr"))
def move_pages_kernel(
    rows_ptr,  # int64 [planes, 4], `PlaneTable.rows`
    slots_ptr,  # int64 [tokens]; negative, or beyond the pool: padding
    pages_ptr,  # int32 [pages, page words]
    sums_ptr,  # int64 [pages], zeroed; None without CHECKSUM
    n_slots,
    n_tokens,
    n_pages,
    n_planes,
    page_stride,  # chunks from one page to the next
    PAGE_TOKENS: tl.constexpr,
    ROW: tl.constexpr,  # chunks of a row; 0: planes differ, read it from the table
    TILES: tl.constexpr,  # tiles of the largest plane of a page
    CHUNKS: tl.constexpr,  # chunks of a tile
    VEC: tl.constexpr,  # words of a chunk: 4, or 2 or 1 where rows are not 16-byte aligned
    PACK: tl.constexpr,  # pool to pages, or pages to pool
    CHECKSUM: tl.constexpr,
):
    lane = tl.arange(0, VEC)[None, :]
    for work in range(tl.program_id(0), n_pages * n_planes * TILES, tl.num_programs(0)):
        plane = work // TILES % n_planes
        page = work // (TILES * n_planes)
        entry = rows_ptr + plane * 4
        base = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int32)), VEC * 4)
        slot_stride = tl.load(entry + 1)
        row = tl.load(entry + 2).to(tl.int32) if ROW == 0 else ROW
        first = tl.load(entry + 3).to(tl.int32) * PAGE_TOKENS

        chunk = work % TILES * CHUNKS + tl.arange(0, CHUNKS)
        inside = chunk < PAGE_TOKENS * row
        token = page * PAGE_TOKENS + chunk // row
        slot = tl.load(slots_ptr + token, mask=inside & (token < n_tokens), other=-1)
        # A slot beyond the pool cannot be reported without a synchronisation; but nothing outside the pool is accessed.
        live = (slot >= 0) & (slot < n_slots)
        in_pool = base + ((slot * slot_stride + chunk % row) * VEC)[:, None] + lane
        in_page = pages_ptr + ((page.to(tl.int64) * page_stride + first + chunk) * VEC)[:, None] + lane
        live_words = tl.broadcast_to(live[:, None], (CHUNKS, VEC))
        if PACK:
            # Padding is written too, as zeros: a page's bytes are a function of its tokens.
            words = tl.load(in_pool, mask=live_words, other=0, cache_modifier=".cg")
            inside_words = tl.broadcast_to(inside[:, None], (CHUNKS, VEC))
            tl.store(in_page, words, mask=inside_words, cache_modifier=".cs")
            if CHECKSUM:
                tl.atomic_add(sums_ptr + page, _tile_sum(words, (first + chunk) * VEC, inside, VEC), sem="relaxed")
        else:
            words = tl.load(in_page, mask=live_words, other=0, cache_modifier=".cg")
            tl.store(in_pool, words, mask=live_words, cache_modifier=".cs")


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=("sums_ptr",))
def checksum_kernel(
    pages_ptr,  # int32 [pages, page words]
    sums_ptr,  # int64 [pages], zeroed
    n_pages,
    page_chunks,
    page_stride,  # chunks from one page to the next
    CHUNKS: tl.constexpr,
    VEC: tl.constexpr,
):
    tiles = tl.cdiv(page_chunks, CHUNKS)
    for work in range(tl.program_id(0), n_pages * tiles, tl.num_programs(0)):
        page = work // tiles
        chunk = work % tiles * CHUNKS + tl.arange(0, CHUNKS)
        inside = chunk < page_chunks
        at = ((page.to(tl.int64) * page_stride + chunk) * VEC)[:, None] + tl.arange(0, VEC)[None, :]
        mask = tl.broadcast_to(inside[:, None], (CHUNKS, VEC))
        words = tl.load(pages_ptr + at, mask=mask, other=0, cache_modifier=".cg")
        tl.atomic_add(sums_ptr + page, _tile_sum(words, chunk * VEC, inside, VEC), sem="relaxed")


def pack(
    table: PlaneTable,
    slots: torch.Tensor,
    page_tokens: int,
    *,
    out: torch.Tensor | None = None,
    checksum: bool = False,
    programs: int | None = None,
) -> Packed:
    """See `april_kernels.kv_pages.pack`. A slot beyond the pool counts as padding."""
    slots = layout.checked_slots(table.device, slots)
    pages = layout.pages_for(table, slots, page_tokens, out)
    sums = torch.zeros(pages.shape[0], dtype=torch.int64, device=table.device) if checksum else None
    _move(table, slots, pages, page_tokens, sums, is_pack=True, programs=programs)
    return Packed(pages, sums)


def unpack(table: PlaneTable, slots: torch.Tensor, pages: torch.Tensor, *, programs: int | None = None) -> None:
    """See `april_kernels.kv_pages.unpack`. A slot beyond the pool counts as padding."""
    slots = layout.checked_slots(table.device, slots)
    page_tokens = table.page_tokens(pages)
    n_pages = layout.page_count(slots.numel(), page_tokens)
    layout.checked_pages(table.device, pages, n_pages, table.page_words(page_tokens))
    _move(table, slots, pages, page_tokens, None, is_pack=False, programs=programs)


def checksum(pages: torch.Tensor, *, programs: int | None = None) -> torch.Tensor:
    """See `april_kernels.kv_pages.checksum`."""
    n_pages, words = pages.shape
    sums = torch.zeros(n_pages, dtype=torch.int64, device=pages.device)
    if not pages.numel():
        return sums
    vec = layout.vector_words(pages)
    shape = tile_shape(words, warp_size())
    grid = (bounded_programs(n_pages * shape.tiles, pages.device, programs),)
    with on_device(pages.device):
        checksum_kernel[grid](
            pages,
            sums,
            n_pages,
            words // vec,
            pages.stride(0) // vec,
            CHUNKS=shape.words // vec,
            VEC=vec,
            num_warps=shape.warps,
        )
    return sums


def warm_up(table: PlaneTable, page_tokens: int) -> None:
    """See `april_kernels.kv_pages.warm_up`. Works on padding alone, so it neither reads nor writes the pool."""
    padding = torch.full((page_tokens,), -1, dtype=torch.int64, device=table.device)
    pages, _ = pack(table, padding, page_tokens, checksum=True)
    pack(table, padding, page_tokens, out=pages)
    unpack(table, padding, pages)
    checksum(pages)


def _move(
    table: PlaneTable,
    slots: torch.Tensor,
    pages: torch.Tensor,
    page_tokens: int,
    sums: torch.Tensor | None,
    *,
    is_pack: bool,
    programs: int | None,
) -> None:
    if not slots.numel():
        return
    # The table counts in units of the pool's alignment. Pages aligned worse than the pool are refused, not slowed down.
    vec = table.alignment // layout.WORD_BYTES
    if layout.common_alignment(table, pages) != table.alignment:
        raise ValueError(f"pages must be {table.alignment}-byte aligned, in address and stride, like the pool")
    largest = page_tokens * max(table.row_words)
    shape = tile_shape(largest, warp_size())
    grid = (bounded_programs(pages.shape[0] * len(table.planes) * shape.tiles, table.device, programs),)
    with on_device(table.device):
        move_pages_kernel[grid](
            table.rows,
            slots,
            pages,
            sums,
            table.slots,
            slots.numel(),
            pages.shape[0],
            len(table.planes),
            pages.stride(0) // vec,
            PAGE_TOKENS=page_tokens,
            ROW=table.row_words[0] // vec if len(set(table.row_words)) == 1 else 0,
            TILES=shape.tiles,
            CHUNKS=shape.words // vec,
            VEC=vec,
            PACK=is_pack,
            CHECKSUM=sums is not None,
            num_warps=shape.warps,
        )


class TileShape(NamedTuple):
    words: int
    """Words of a tile, a power of two."""
    tiles: int
    """Number of tiles that cover the run of words."""
    warps: int


def tile_shape(words: int, warp: int) -> TileShape:
    """Tiles for runs of up to `words` words on warps of `warp` threads: at least one 16-byte access per thread."""
    tile = min(max(triton.next_power_of_2(words), _MIN_TILE_WORDS), _MAX_TILE_WORDS)
    return TileShape(tile, triton.cdiv(words, tile), min(8, tile // (warp * 4)))


def warp_size() -> int:
    """Threads of a warp: 64 on the AMD data-centre GPUs this is written for, 32 on NVIDIA and in the interpreter."""
    return 64 if torch.version.hip else 32


def bounded_programs(work: int, device: torch.device, programs: int | None) -> int:
    """Programs for `work` tiles: no more than `programs`, or than what fills the GPU. Each takes tile after tile."""
    if work >= 2**30:
        raise ValueError(f"{work} tiles in one launch; split the call")
    if programs is None:
        # The interpreter runs programs one after another.
        on_gpu = device.type == "cuda"
        programs = _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
    return min(work, programs)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
