# ruff: noqa: ANN001, ANN201, N803, N806 (Triton's own conventions: arguments by comment, constexpr in capitals)
# mypy: disable-error-code=no-untyped-def
"""int8 pages on a GPU, in one pass over the rows. Call `int8.pack` and `int8.unpack`."""

import torch
import triton
import triton.language as tl

from april_kernels.kv_pages import int8_layout
from april_kernels.kv_pages.int8_layout import Int8Layout
from april_kernels.kv_pages.layout import vector_words
from april_kernels.kv_pages.triton_impl import bounded_programs, on_device, warp_size

_LEVELS = tl.constexpr(int8_layout.LEVELS)
_SMALLEST = tl.constexpr(int8_layout.SMALLEST)
_ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_TILE = 4096
"""Elements of a tile: 16 per thread of 4 warps of 64 (32 of 32), so that a store of codes is 16 bytes wide."""


@triton.jit(
    do_not_specialize=("n_slots", "n_tokens", "n_pages", "n_planes", "page_stride"),
    do_not_specialize_on_alignment=("slots_ptr", "scales_ptr"),
)
def int8_kernel(
    rows_ptr,  # int64 [planes, 4], `HeadGroup.rows`
    slots_ptr,  # int64 [tokens]; negative, or beyond the pool: padding
    codes_ptr,  # int8, the first page's codes
    scales_ptr,  # float32, the first page's scales
    n_slots,
    n_tokens,
    n_pages,
    n_planes,
    page_stride,  # 16-byte units from one page to the next
    PAGE_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # bytes of the pool's rows
    CODE_UNIT: tl.constexpr,  # bytes that every plane's codes begin at a multiple of
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PACK: tl.constexpr,
):
    """A row here is one head of one token: it has one scale."""
    UNIT: tl.constexpr = ALIGNMENT // (ELEMENT.primitive_bitwidth // 8)
    ROWS: tl.constexpr = PAGE_TOKENS * HEADS
    TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    d = tl.arange(0, BLOCK_DIM)[None, :]
    for work in range(tl.program_id(0), n_pages * n_planes * TILES, tl.num_programs(0)):
        plane = work // TILES % n_planes
        page = work // (TILES * n_planes)
        entry = rows_ptr + plane * 4
        base = tl.multiple_of(tl.load(entry).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
        slot_stride = tl.load(entry + 1)
        first_code = tl.load(entry + 2) * (PAGE_TOKENS * CODE_UNIT)
        first_scale = tl.load(entry + 3) * PAGE_TOKENS

        row = work % TILES * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        inside = row < ROWS
        token = page * PAGE_TOKENS + row // HEADS
        slot = tl.load(slots_ptr + token, mask=inside & (token < n_tokens), other=-1)
        live = (slot >= 0) & (slot < n_slots)
        in_pool = base + (slot * slot_stride * UNIT + row % HEADS * DIM)[:, None] + d
        page_at = page.to(tl.int64) * page_stride
        in_codes = codes_ptr + page_at * 16 + (first_code + row * DIM)[:, None] + d
        in_scales = scales_ptr + page_at * 4 + first_scale + row
        if PACK:
            x = tl.load(in_pool, mask=live[:, None] & (d < DIM), other=0, cache_modifier=".cg").to(tl.float32)
            largest = tl.max(tl.abs(x), axis=1)
            real = largest > _SMALLEST
            y = x * tl.where(real, tl.div_rn(_LEVELS, largest), 0.0)[:, None]
            # Casting truncates: adding a half first rounds halves away from zero, alike on every target.
            codes = (y + tl.where(y >= 0, 0.5, -0.5)).to(tl.int8)
            tl.store(in_codes, codes, mask=inside[:, None] & (d < DIM), cache_modifier=".cs")
            tl.store(in_scales, tl.where(real, tl.div_rn(largest, _LEVELS), 0.0), mask=inside)
        else:
            codes = tl.load(in_codes, mask=live[:, None] & (d < DIM), other=0, cache_modifier=".cg")
            scale = tl.load(in_scales, mask=live, other=0.0)
            x = codes.to(tl.float32) * scale[:, None]
            tl.store(in_pool, x.to(ELEMENT), mask=live[:, None] & (d < DIM), cache_modifier=".cs")


def quantize(layout: Int8Layout, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Write the codes and scales of `pages`; padding becomes zero."""
    _launch(layout, slots, page_tokens, pages, is_pack=True)


def dequantize(layout: Int8Layout, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor) -> None:
    """Write the rows of the slots that are not padding, rounded to the pool's dtype."""
    _launch(layout, slots, page_tokens, pages, is_pack=False)


def _launch(layout: Int8Layout, slots: torch.Tensor, page_tokens: int, pages: torch.Tensor, *, is_pack: bool) -> None:
    if vector_words(pages) != 4:
        raise ValueError("int8 pages must be 16-byte aligned, in address and stride")
    codes, scales = int8_layout.sections(layout, pages, page_tokens)
    for group in layout.groups:
        block_rows, block_dim, warps = tile_shape(page_tokens * group.heads, group.dim, warp_size())
        work = pages.shape[0] * len(group.members) * triton.cdiv(page_tokens * group.heads, block_rows)
        with on_device(layout.table.device):
            int8_kernel[(bounded_programs(work, layout.table.device, None),)](
                group.rows,
                slots,
                codes,
                scales,
                layout.table.slots,
                slots.numel(),
                pages.shape[0],
                len(group.members),
                pages.stride(0) // 4,
                PAGE_TOKENS=page_tokens,
                HEADS=group.heads,
                DIM=group.dim,
                ELEMENT=_ELEMENTS[layout.dtype],
                ALIGNMENT=layout.table.alignment,
                CODE_UNIT=layout.code_unit,
                BLOCK_ROWS=block_rows,
                BLOCK_DIM=block_dim,
                PACK=is_pack,
                num_warps=warps,
            )


def tile_shape(rows: int, dim: int, warp: int) -> tuple[int, int, int]:
    """Rows and elements of a tile and its warps of `warp` threads, for pages of `rows` heads of `dim` elements."""
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, min(_TILE // block_dim, triton.next_power_of_2(rows)))
    return block_rows, block_dim, min(4, max(1, block_rows * block_dim // (16 * warp)))
