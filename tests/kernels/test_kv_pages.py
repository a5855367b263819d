"""The torch pages against a byte-by-byte model, and the public functions' promises on a CPU."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from april_kernels import kv_pages
from april_kernels.kv_pages import PlaneTable, blocks
from tests.kernels.pools import POISON, PoolShape, bytes_of, choose_slots, poisoned_allocations, pool, same

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32]


def model_page_bytes(table: PlaneTable, slots: list[int], page_tokens: int) -> list[bytes]:
    """Pages by the words of their definition: page after page, plane after plane, token after token."""
    rows = [plane.view(torch.uint8).numpy() for plane in table.planes]
    pages = []
    for first in range(0, len(slots), page_tokens):
        places = (slots[first : first + page_tokens] + [-1] * page_tokens)[:page_tokens]
        pages.append(b"".join(r[s].tobytes() if s >= 0 else bytes(r.shape[1]) for r in rows for s in places))
    return pages


def model_checksum(page: bytes) -> int:
    mask, total = 2**64 - 1, 0
    for place in range(len(page) // 4):
        key = (place + 1) * 0x9E3779B97F4A7C15 & mask
        key = (key ^ key >> 32) * 0xBF58476D1CE4E5B9 & mask
        key = (key ^ key >> 32) | 1
        mixed = (key ^ int.from_bytes(page[4 * place : 4 * place + 4], "little")) * key & mask
        total += mixed ^ mixed >> 32
    return total & mask


@st.composite
def moves(draw: st.DrawFn) -> tuple[PoolShape, list[int], int]:
    dtype = draw(st.sampled_from(DTYPES))
    dims = st.integers(1, 6).map(lambda n: n * 4 // dtype.itemsize)
    plane = st.tuples(st.integers(1, 5), dims)
    planes = draw(st.lists(plane, min_size=1, max_size=3))
    slots = draw(st.lists(st.integers(0, 29), unique=True, max_size=30))
    for hole in draw(st.lists(st.integers(0, len(slots) - 1), max_size=4)) if slots else []:
        slots[hole] = -1
    return PoolShape(tuple(planes), dtype), slots, draw(st.sampled_from([1, 3, 16, 64]))


@settings(max_examples=60, deadline=None)
@given(moves())
def test_page_bytes_match_definition(case: tuple[PoolShape, list[int], int]) -> None:
    shape, slots, page_tokens = case
    table, other = pool(shape, 30, "cpu"), pool(shape, 30, "cpu", empty=True)
    chosen = torch.tensor(slots, dtype=torch.int64)
    with poisoned_allocations():
        pages, sums = kv_pages.pack(table, chosen, page_tokens, checksum=True)
    expected = model_page_bytes(table, slots, page_tokens)
    assert [page.numpy().tobytes() for page in pages] == expected
    assert [s % 2**64 for s in sums.tolist()] == [model_checksum(page) for page in expected]
    kv_pages.unpack(other, chosen, pages)
    live = chosen[chosen >= 0]
    for mine, other_bytes in zip(bytes_of(other), bytes_of(table), strict=True):
        assert torch.equal(mine[live], other_bytes[live])
        mine[live] = POISON
        assert bool((mine == POISON).all())


def test_page_bytes_are_independent_of_slots() -> None:
    """The same tokens at other slots, or with another index dtype, give the same bytes."""
    shape = PoolShape(((2, 8), (2, 4)), torch.bfloat16)
    table, moved = pool(shape, 40, "cpu"), pool(shape, 40, "cpu", empty=True)
    slots, others = choose_slots("random", 21, 40, "cpu"), choose_slots("random", 21, 40, "cpu", seed=1)
    pages, _ = kv_pages.pack(table, slots, 16)
    kv_pages.unpack(moved, others, pages)
    again, _ = kv_pages.pack(moved, others.to(torch.int32), 16)
    assert torch.equal(pages, again)


def test_strided_output_writes_only_its_pages() -> None:
    table = pool(PoolShape(((2, 8),), torch.float32), 40, "cpu")
    slots, words = choose_slots("random", 20, 40, "cpu"), table.page_words(16)
    guarded = torch.full((2, words + 8), 0x7F7F7F7F, dtype=torch.int32)
    pages, _ = kv_pages.pack(table, slots, 16, out=guarded[:, :words])
    assert pages.data_ptr() == guarded.data_ptr()
    assert torch.equal(guarded[:, :words], kv_pages.pack(table, slots, 16).pages)
    assert bool((guarded[:, words:] == 0x7F7F7F7F).all())


def test_any_flipped_bit_changes_the_checksum() -> None:
    pages = torch.randint(-(2**31), 2**31 - 1, (1, 40), dtype=torch.int32)
    good = kv_pages.checksum(pages)
    for bit in range(pages.numel() * 32):
        damaged = pages.clone()
        damaged.view(torch.uint8)[0, bit // 8] ^= 1 << bit % 8
        assert not torch.equal(kv_pages.checksum(damaged), good), f"bit {bit}"


def test_swapped_and_lost_words_change_the_checksum() -> None:
    pages = torch.randint(-(2**31), 2**31 - 1, (1, 1000), dtype=torch.int32)
    good = int(kv_pages.checksum(pages))
    swapped = pages.clone()
    swapped[0, [3, 900]] = swapped[0, [900, 3]]
    torn = pages.clone()
    torn[0, 500:] = 0
    sums = [int(kv_pages.checksum(p)) for p in (swapped, torn, pages[:, :999], torch.zeros(1, 9, dtype=torch.int32))]
    assert len({good, *sums}) == 5


def test_checksums_of_pages_longer_than_a_chunk() -> None:
    """Checksums are computed in chunks; the result must not depend on chunk boundaries."""
    from april_kernels.kv_pages import reference

    pages = torch.randint(-(2**31), 2**31 - 1, (2, 1000), dtype=torch.int32)
    whole = kv_pages.checksum(pages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CHECKSUM_WORDS", 64)
        assert torch.equal(kv_pages.checksum(pages), whole)


def _floats(*size: int) -> torch.Tensor:
    return torch.zeros(size)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PlaneTable.of([]), "at least one buffer"),
        (lambda: PlaneTable.mha([_floats(9, 1, 4)], []), "as many K as V"),
        (lambda: PlaneTable.of([_floats(9, 4)]), r"not \[slots, heads, dim\]"),
        (lambda: PlaneTable.of([_floats(9, 2, 4), _floats(8, 2, 4)]), "buffer 1.*differs in device or slots"),
        (lambda: PlaneTable.of([_floats(9, 4, 2).transpose(1, 2)]), "not contiguous"),
        (lambda: PlaneTable.of([_floats(1, 2, 4).expand(9, 2, 4)]), "not contiguous"),
        (lambda: PlaneTable.of([_floats(9, 1, 3).to(torch.bfloat16)]), "not whole 4-byte words"),
        (lambda: _pack(slots=torch.zeros(3)), "slots must be int32 or int64"),
        (lambda: _pack(slots=torch.zeros(3, 1, dtype=torch.int64)), "slots must be"),
        (lambda: _pack(page_tokens=0), "0 words"),
        (lambda: _pack(out=torch.zeros(2, 64, dtype=torch.int32)), r"must be int32 \[1, 64\]"),
        (lambda: _pack(out=torch.zeros(1, 64)), "must be int32"),
        (lambda: _unpack(torch.zeros(1, 63, dtype=torch.int32)), "does not hold whole tokens"),
        (lambda: _unpack(torch.zeros(2, 64, dtype=torch.int32)), r"must be int32 \[1, 64\]"),
        (lambda: kv_pages.checksum(torch.zeros(2, 64)), "must be int32"),
    ],
)
def test_errors_name_the_bad_argument(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def _pack(*, slots: torch.Tensor | None = None, page_tokens: int = 16, out: torch.Tensor | None = None) -> object:
    table = PlaneTable.of([_floats(9, 1, 4)])
    return kv_pages.pack(table, torch.arange(3) if slots is None else slots, page_tokens, out=out)


def _unpack(pages: torch.Tensor) -> None:
    kv_pages.unpack(PlaneTable.of([_floats(9, 1, 4)]), torch.arange(3), pages)


def test_out_of_range_slot_raises() -> None:
    with pytest.raises(IndexError):
        _pack(slots=torch.tensor([9]))


def test_empty_input_gives_no_pages() -> None:
    table = PlaneTable.of([_floats(9, 1, 4)])
    before = bytes_of(table)
    pages, sums = kv_pages.pack(table, torch.zeros(0, dtype=torch.int64), 16, checksum=True)
    assert tuple(pages.shape) == (0, 64)
    assert sums is not None
    assert not sums.numel()
    kv_pages.unpack(table, torch.zeros(0, dtype=torch.int64), pages)
    assert same(before, bytes_of(table))


def test_buffers_may_be_slices_of_one_tensor() -> None:
    """Slots may have a stride, as in pools where several layers share one allocation."""
    whole = torch.randn(30, 4, 2, 8)
    table = PlaneTable.of([whole[:, layer] for layer in range(4)])
    slots = choose_slots("random", 10, 30, "cpu")
    pages, _ = kv_pages.pack(table, slots, 16)
    assert [page.numpy().tobytes() for page in pages] == model_page_bytes(table, slots.tolist(), 16)


def test_warm_up_does_not_change_pool() -> None:
    table = pool(PoolShape(((2, 8),), torch.float32), 40, "cpu")
    before = bytes_of(table)
    kv_pages.warm_up(table, 16)
    assert same(before, bytes_of(table))


def test_large_blocks_use_huge_pages_where_available() -> None:
    """Otherwise the first write to every 4 KB is a page fault."""
    block = blocks.empty((blocks.FRESH_BYTES // 64 + 1, 16))
    assert (block.dtype, block.shape) == (torch.int32, (blocks.FRESH_BYTES // 64 + 1, 16))
    block[-1] = 7
    assert int(block[-1].sum()) == 7 * 16
    assert ("hg" in mapping_flags(block.data_ptr())) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert "hg" not in mapping_flags(blocks.empty((16, 16)).data_ptr())


def mapping_flags(address: int) -> list[str]:
    """Linux's flags of the mapping with this address; none elsewhere."""
    smaps, there = Path("/proc/self/smaps"), False
    for line in smaps.read_text().splitlines() if smaps.exists() else ():
        if (bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif there and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
