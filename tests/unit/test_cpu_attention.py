"""Decode attention of the CPU platform against SGLang's own, request by request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_april.cpu import CHOSEN_BY_PLATFORM
from sglang_april.cpu.attention import TorchCpuAttention, install, ragged_slots

ROWS, CONTEXT, SLOTS = 12, 96, 2048
LENGTHS = [1, 64, 2, 33, 95, 17]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.016}
"""Of the parent's result; bfloat16: one unit in the last place of values up to 4."""


def backend(kind: type, pages: int = 1) -> Any:
    """A backend over empty pools whose rows hold random slots (whole pages in random order)."""
    order = torch.randperm(SLOTS // pages)[: ROWS * CONTEXT // pages]
    slots = (order[:, None] * pages + torch.arange(pages)).view(ROWS, CONTEXT).to(torch.int32)
    pool = SimpleNamespace(req_to_token=slots)
    return kind(SimpleNamespace(device="cpu", req_to_token_pool=pool, token_to_kv_pool=None))


class AttentionCase:
    """Queries, caches and rows for a batch of `LENGTHS`; both backends answer from the same pools."""

    def __init__(self, heads: int, kv_heads: int, dtype: torch.dtype, size: int = 32, pages: int = 1) -> None:
        torch.manual_seed(heads * 100 + kv_heads)
        self.actual, self.parent = backend(TorchCpuAttention, pages), backend(TorchNativeAttnBackend, pages)
        self.parent.req_to_token_pool = self.actual.req_to_token_pool
        self.gqa = heads != kv_heads
        self.query = torch.randn(len(LENGTHS), heads, size).to(dtype)
        self.keys = torch.randn(SLOTS, kv_heads, size).to(dtype)
        self.values = torch.randn(SLOTS, kv_heads, size).to(dtype)
        self.rows = torch.randperm(ROWS)[: len(LENGTHS)]

    def answer(self, which: Any, pick: list[int] | None = None, **options: Any) -> torch.Tensor:
        """Attention of some requests of the batch, in the given order."""
        pick = list(range(len(LENGTHS))) if pick is None else pick
        query, rows = self.query[pick], self.rows[pick]
        which.use_sliding_window_kv_pool = False
        which.init_forward_metadata(SimpleNamespace(out_cache_loc=None))
        return which._run_sdpa_forward_decode(
            query,
            torch.empty_like(query),
            self.keys,
            self.values,
            which.req_to_token_pool.req_to_token,
            rows,
            torch.tensor(LENGTHS)[pick],
            scaling=0.2,
            enable_gqa=self.gqa,
            **options,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("pages", [1, 4])
def test_decode_matches_the_parent(heads: int, kv_heads: int, dtype: torch.dtype, pages: int) -> None:
    case = AttentionCase(heads, kv_heads, dtype, pages=pages)
    actual, parent = case.answer(case.actual), case.answer(case.parent)
    assert actual.dtype is dtype
    assert (actual - parent).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 32, 128])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, size: int) -> None:
    case = AttentionCase(4, 2, dtype, size)
    whole = case.answer(case.actual)
    for pick in ([0], [4], [5, 1], [3, 2, 4, 0], [5, 4, 3, 2, 1, 0]):
        assert torch.equal(case.answer(case.actual, pick), whole[pick])


def test_nan_stays_in_its_own_request() -> None:
    case = AttentionCase(4, 2, torch.float32)
    whole = case.answer(case.actual)
    case.query[3, 1] = float("nan")
    got = case.answer(case.actual)
    assert got[3, 1].isnan().all()
    got[3, 1] = whole[3, 1]
    assert torch.equal(got, whole)


def test_scores_far_below_the_largest_have_no_weight() -> None:
    case = AttentionCase(4, 4, torch.float32)
    case.query *= 300
    actual, parent = case.answer(case.actual), case.answer(case.parent)
    assert (actual - parent).abs().max() <= TOLERANCE[torch.float32] * 10


def test_slots_are_looked_up_once_per_step() -> None:
    case = AttentionCase(4, 2, torch.bfloat16)
    assert not torch.equal(case.answer(case.actual, [0]), case.answer(case.actual, [1]))
    step = case.actual._step
    case.actual.use_sliding_window_kv_pool = False
    case.actual._run_sdpa_forward_decode(
        case.query[[1]], torch.empty(1, 4, 32).bfloat16(), case.keys, case.values, None, None, None, scaling=0.2
    )
    assert case.actual._step is step


@pytest.mark.parametrize("window", [0, 5])
def test_a_sliding_window_falls_back(window: int) -> None:
    case = AttentionCase(4, 2, torch.float32)
    actual = case.answer(case.actual, sliding_window_size=window)
    assert torch.equal(actual, case.answer(case.parent, sliding_window_size=window))
    assert case.actual._step is None


def test_a_cache_of_another_type_falls_back() -> None:
    case = AttentionCase(4, 2, torch.bfloat16)
    case.query = case.query.float()
    assert torch.equal(case.answer(case.actual), case.answer(case.parent))


def test_ragged_slots() -> None:
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    slots, lengths = ragged_slots(table, torch.tensor([2, 0]), torch.tensor([3, 1]))
    assert (slots.tolist(), lengths) == ([8, 9, 10, 0], [3, 1])


def test_backend_chosen_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "torch_native", None)
    install()
    runner = SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    monkeypatch.setenv(CHOSEN_BY_PLATFORM, "1")
    assert type(ATTENTION_BACKENDS["torch_native"](runner)) is TorchCpuAttention
    monkeypatch.delenv(CHOSEN_BY_PLATFORM)
    assert type(ATTENTION_BACKENDS["torch_native"](runner)) is TorchNativeAttnBackend
