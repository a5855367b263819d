"""The CPU platform: cores for every rank, and pages that stay whole."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_april.cpu import platform
from sglang_april.cpu.allocator import SweepAllocator, TorchPagedAllocator, make_allocator

PAGE = 4


@pytest.fixture
def allocator() -> TorchPagedAllocator:
    made = make_allocator(10 * PAGE, PAGE, torch.float32, "cpu", kvcache=None, need_sort=False)
    assert isinstance(made, TorchPagedAllocator)
    return made


def prefill(allocator: TorchPagedAllocator, lengths: list[int]) -> list[torch.Tensor] | None:
    none, ends = torch.zeros(len(lengths), dtype=torch.int64), torch.tensor(lengths)
    slots = allocator.alloc_extend(none, none, ends, ends, torch.full_like(ends, -1), sum(lengths))
    return None if slots is None else list(slots.split(lengths))


def decode(allocator: TorchPagedAllocator, rows: list[torch.Tensor]) -> list[torch.Tensor] | None:
    ends = torch.tensor([len(row) + 1 for row in rows])
    slots = allocator.alloc_decode(ends, ends, torch.stack([row[-1] for row in rows]))
    return None if slots is None else [torch.cat((row, slot[None])) for row, slot in zip(rows, slots, strict=True)]


def test_rows_fill_their_pages_in_order_and_share_none(allocator: TorchPagedAllocator) -> None:
    rows = prefill(allocator, [5, 4, 2])
    for _ in range(6):
        assert rows is not None
        rows = decode(allocator, rows)
    assert rows is not None
    for row in rows:
        assert torch.equal(row % PAGE, torch.arange(len(row)) % PAGE)
        assert all(len(set((page // PAGE).tolist())) == 1 for page in row.split(PAGE))
    slots = torch.cat(rows)
    assert len(slots.unique()) == len(slots)
    assert slots.min() >= PAGE, "the first page takes the writes of padding"


def test_too_few_pages_change_nothing(allocator: TorchPagedAllocator) -> None:
    rows = prefill(allocator, [9 * PAGE, PAGE])
    assert rows is not None
    assert prefill(allocator, [1]) is None
    assert decode(allocator, rows) is None
    assert allocator.available_size() == 0
    allocator.free(rows[1])
    assert allocator.available_size() == PAGE
    assert prefill(allocator, [1]) is not None


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3], 2, "0,1|2,3"), ([5], 2, "5|5"), ([0, 1, 2], 2, "0|1")],
)
def test_every_rank_gets_cores(cores: list[int], ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores))
    assert platform.cores_by_rank(ranks) == expected


@pytest.fixture
def sweep() -> SweepAllocator:
    made = make_allocator(8, 1, torch.float32, "cpu", kvcache=None, need_sort=False)
    assert isinstance(made, SweepAllocator)
    return made


def test_slots_allocated_together_are_adjacent(sweep: SweepAllocator) -> None:
    first, second = sweep.alloc(3), sweep.alloc(2)
    assert first is not None
    assert second is not None
    assert [*first.tolist(), *second.tolist()] == [1, 2, 3, 4, 5]
    sweep.free(first)
    assert sweep.available_size() == 6
    taken = sweep.alloc(4)
    assert taken is not None
    assert taken.tolist() == [6, 7, 8, 1], "on, and around the end"
    assert sweep.alloc(3) is None
    rest = sweep.alloc(2)
    assert rest is not None
    assert rest.tolist() == [2, 3]
    assert second.tolist() == [4, 5], "what was handed out stays as it was"
    assert sweep.available_size() == len(sweep.free_pages) == 0


def test_free_group_frees_slots_at_its_end(sweep: SweepAllocator) -> None:
    slots = sweep.alloc(8)
    assert slots is not None
    sweep.free_group_begin()
    sweep.free(slots[2:4])
    sweep.free(slots[6:].to(torch.int32))
    assert sweep.available_size() == 0
    sweep.free_group_end()
    assert sweep.free_pages.tolist() == [3, 4, 7, 8]


@pytest.mark.parametrize("slots", [[1, 1], [1, 2], [1, 0]])
def test_freeing_a_free_slot_raises(sweep: SweepAllocator, slots: list[int]) -> None:
    sweep.alloc(1)
    with pytest.raises(ValueError, match="2 slots were freed, but only 1 of them were allocated"):
        sweep.free(torch.tensor(slots))
    assert sweep.free_pages.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@given(st.lists(st.integers(1, 6), max_size=40), st.randoms(use_true_random=False))
def test_every_slot_is_free_or_taken_once(sizes: list[int], rng: random.Random) -> None:
    made = make_allocator(16, 1, torch.float32, "cpu", kvcache=None, need_sort=False)
    taken: list[torch.Tensor] = []
    for size in sizes:
        if taken and rng.random() < 0.5:
            made.free(taken.pop(rng.randrange(len(taken))))
        elif (slots := made.alloc(size)) is not None:
            taken.append(slots)
        owners = torch.cat([made.free_pages, *taken]).tolist()
        assert sorted(owners) == list(range(1, 17))
        assert made.available_size() == len(made.free_pages)
    made.clear()
    assert sorted(made.free_pages.tolist()) == list(range(1, 17))
