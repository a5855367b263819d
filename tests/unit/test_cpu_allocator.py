"""The CPU platform: cores for every rank, and pages that stay whole."""

import pytest
import torch

from sglang_april.platforms import cpu
from sglang_april.platforms.cpu_allocator import TorchPagedAllocator, make_allocator

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


def test_pages_of_one_token_use_sglang_s_own_allocator() -> None:
    allocator = make_allocator(8, 1, torch.float32, "cpu", kvcache=None, need_sort=False)
    assert not isinstance(allocator, TorchPagedAllocator)
    assert allocator.available_size() == 8


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [([0, 1], 2, "0|1"), ([0, 1, 2, 3], 2, "0,1|2,3"), ([5], 2, "5|5"), ([0, 1, 2], 2, "0|1")],
)
def test_every_rank_gets_cores(cores: list[int], ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cores))
    assert cpu.cores_by_rank(ranks) == expected
