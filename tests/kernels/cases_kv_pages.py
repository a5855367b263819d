"""The page kernels against the torch reference, byte for byte. Started by test_kernels.py."""

import pytest
import torch

from april_kernels.kv_pages import PlaneTable, page_count, reference, triton_impl
from tests.kernels.pools import POISON, PoolShape, bytes_of, choose_slots, huge, poisoned_allocations, pool, same

BF16, FP16, FP8, FP32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32

SHAPES = {
    "bf16 4x128": PoolShape(((4, 128), (4, 128)), BF16, layers=1),
    "fp16 K 2x96, V 2x64": PoolShape(((2, 96), (2, 64)), FP16, layers=1),
    "fp8 5x80": PoolShape(((5, 80), (5, 80)), FP8, layers=1),
    "fp32 3x64": PoolShape(((3, 64), (3, 64)), FP32, layers=1),
    "bf16 MLA 576": PoolShape(((1, 576),), BF16),
    "fp8 MLA 656": PoolShape(((1, 656),), FP8, layers=1),
    "bf16 7x20: rows of 8-byte units": PoolShape(((7, 20), (7, 20)), BF16, layers=1),
    "fp8 3x12: rows of 4-byte units": PoolShape(((3, 12), (3, 12)), FP8),
    "bf16 1x2: a row is one word": PoolShape(((1, 2),), BF16),
}
SLOTS = 150
COPIES = {
    1: ((0, "random"), (1, "contiguous"), (5, "holes")),
    16: ((16, "contiguous"), (33, "random"), (20, "holes")),
    64: ((64, "holes"), (70, "random")),
}
"""Page size → (tokens, kind of slots): no pages, whole ones, partial last ones."""


@pytest.mark.parametrize("page_tokens", COPIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_matches_reference(shape: str, page_tokens: int, device: str) -> None:
    table = pool(SHAPES[shape], SLOTS, device)
    for seed, (tokens, kind) in enumerate(COPIES[page_tokens]):
        slots = choose_slots(kind, tokens, SLOTS, device, seed=seed)
        expected = reference.pack(table, slots, page_tokens, checksum=True)
        with poisoned_allocations():
            pages, sums = triton_impl.pack(table, slots, page_tokens, checksum=True, programs=5)
            plain, none = triton_impl.pack(table, slots, page_tokens, programs=3)
        assert none is None
        assert same((pages, plain, sums), (expected.pages, expected.pages, expected.sums)), (tokens, kind)
        assert torch.equal(triton_impl.checksum(pages, programs=2), sums)

        actual, expected_pool = (pool(SHAPES[shape], SLOTS, device, empty=True) for _ in range(2))
        others = torch.where(slots < 0, -1, choose_slots("random", tokens, SLOTS, device, seed=seed + 1))
        triton_impl.unpack(actual, others, pages, programs=7)
        reference.unpack(expected_pool, others, pages)
        assert same(bytes_of(actual), bytes_of(expected_pool)), (tokens, kind)


def test_kernel_writes_only_its_pages(device: str) -> None:
    table = pool(SHAPES["fp16 K 2x96, V 2x64"], SLOTS, device)
    slots = choose_slots("holes", 37, SLOTS, device)
    words = table.page_words(16)
    guarded = torch.full((5, words + 64), 0x7F7F7F7F, dtype=torch.int32, device=device)
    inside = guarded[1:4, 32:-32]
    triton_impl.pack(table, slots, 16, out=inside)
    assert torch.equal(inside, reference.pack(table, slots, 16).pages)
    inside.fill_(0x7F7F7F7F)
    assert bool((guarded == 0x7F7F7F7F).all())


def test_out_of_range_slots_access_nothing(device: str) -> None:
    table = pool(SHAPES["fp32 3x64"], SLOTS, device)
    before = bytes_of(table)
    beyond = torch.tensor([SLOTS, 3, 2**40, -(2**40)], device=device)
    pages, _ = triton_impl.pack(table, beyond, 4)
    padded = torch.where(beyond == 3, 3, -1)
    assert torch.equal(pages, reference.pack(table, padded, 4).pages)
    triton_impl.unpack(table, beyond, pages)
    assert same(before, bytes_of(table))


def test_buffers_with_slot_stride(device: str) -> None:
    whole = torch.randn(40, 3, 2, 64, device=device)
    table = PlaneTable.of([whole[:, layer] for layer in range(3)])
    slots = choose_slots("random", 21, 40, device)
    pages, _ = triton_impl.pack(table, slots, 16)
    assert torch.equal(pages, reference.pack(table, slots, 16).pages)
    whole.zero_()
    triton_impl.unpack(table, slots, pages)
    assert torch.equal(reference.pack(table, slots, 16).pages, pages)


@pytest.mark.parametrize("bit", [0, 31, 32 * 511 + 31, 32 * 512])
def test_flipped_bit_changes_checksum(bit: int, device: str) -> None:
    table = pool(SHAPES["bf16 4x128"], SLOTS, device)
    pages, sums = triton_impl.pack(table, choose_slots("random", 37, SLOTS, device), 16, checksum=True)
    assert sums is not None
    pages.view(torch.uint8)[1, bit // 8] ^= 1 << bit % 8
    assert (triton_impl.checksum(pages) != sums).tolist() == [False, True, False]


def test_checksum_is_independent_of_tiling(device: str) -> None:
    table = pool(SHAPES["bf16 MLA 576"], SLOTS, device)
    pages, sums = triton_impl.pack(table, choose_slots("random", 64, SLOTS, device), 64, checksum=True)
    assert sums is not None
    for tile in (256, 1024):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_impl, "_MAX_TILE_WORDS", tile)
            assert torch.equal(triton_impl.checksum(pages), sums)


def test_pages_with_smaller_alignment_than_pool_are_refused(device: str) -> None:
    table = pool(SHAPES["fp32 3x64"], SLOTS, device)
    out = torch.empty(table.page_words(4) + 1, dtype=torch.int32, device=device)[1:].unsqueeze(0)
    with pytest.raises(ValueError, match="16-byte aligned"):
        triton_impl.pack(table, torch.arange(4, device=device), 4, out=out)


def test_gpu_warm_up_does_not_change_pool(device: str) -> None:
    table = pool(SHAPES["fp32 3x64"], SLOTS, device)
    before = bytes_of(table)
    triton_impl.warm_up(table, 16)
    assert same(before, bytes_of(table))


ROW = 1024
BEYOND_INT32 = 2**31 // ROW + 16
"""Rows of 4 KB, more than 2**31 words in all."""


def test_pool_beyond_2_31_words(device: str) -> None:
    plane = huge(BEYOND_INT32 * ROW, device).view(BEYOND_INT32, 1, ROW)
    slots = torch.tensor([BEYOND_INT32 - 1, 5, BEYOND_INT32 - 2, 7], device=device)
    marks = torch.arange(1, 5, dtype=torch.int32, device=device)
    plane[slots, 0, ::37] = marks[:, None]
    table = PlaneTable.of([plane])
    pages, _ = triton_impl.pack(table, slots, 4)
    assert torch.equal(pages, reference.pack(table, slots, 4).pages)
    assert pages.view(4, ROW)[:, 37].tolist() == [1, 2, 3, 4]
    triton_impl.unpack(table, slots.flip(0), pages)
    assert plane[slots, 0, 37].tolist() == [4, 3, 2, 1]
    plane[slots] = 0
    assert plane[:16].count_nonzero() == 0


def test_pages_beyond_2_31_words(device: str) -> None:
    """The last page lies beyond; all others are padding and share their memory with nothing."""
    table = pool(PoolShape(((1, 4 * ROW),), FP8), 8, device)
    stride = 2**31 // 2 + 4096
    guarded = huge(3 * stride, device).view(3, stride)[:, : table.page_words(4)]
    slots = torch.tensor([-1] * 8 + [3, 1, 2, 0], device=device)
    _, sums = triton_impl.pack(table, slots, 4, out=guarded, checksum=True)
    expected = reference.pack(table, slots, 4, checksum=True)
    assert torch.equal(guarded, expected.pages)
    assert same((sums, triton_impl.checksum(guarded)), (expected.sums, expected.sums))
    restored = pool(PoolShape(((1, 4 * ROW),), FP8), 8, device, empty=True)
    triton_impl.unpack(restored, slots, guarded)
    assert all(torch.equal(a[:4], b[:4]) for a, b in zip(bytes_of(restored), bytes_of(table), strict=True))
    assert bool((bytes_of(restored)[0][4:] == POISON).all())
    assert page_count(slots.numel(), 4) == 3
