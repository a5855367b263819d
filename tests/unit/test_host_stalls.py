"""Building and sampling a batch does not make the host wait for a GPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from april_kernels import seeded_sampling
from sglang_april.adapter.core import host_to_device, page_pool, sampler
from sglang_april.adapter.core.sampler import RowSeeds
from tests.support.sync_detector import SyncDetector

VOCAB = 50


def request(seed: int | None, **params: Any) -> Any:
    made = SamplingParams(sampling_seed=seed, **params)
    made.normalize(None)
    april = SimpleNamespace(recompute=SimpleNamespace(in_progress=False))
    return SimpleNamespace(april=None if seed is None else april, sampling_params=made)


def info_of(reqs: list[Any]) -> Any:
    params = [r.sampling_params for r in reqs]
    return SimpleNamespace(
        april=RowSeeds.of(SimpleNamespace(reqs=reqs, device="cpu")),
        top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32),
        top_ps=torch.tensor([p.top_p for p in params]),
        min_ps=torch.tensor([p.min_p for p in params]),
    )


def stock(_sampler: Any, probs: torch.Tensor, *_args: Any) -> torch.Tensor:
    return torch.full((len(probs),), -1, dtype=torch.int32)


ROWS = [request(5), request(None, top_p=0.5), request(6, top_p=0.4), request(7, top_k=3), request(None), request(8)]
PROBS = torch.rand(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
POSITIONS = torch.arange(10, 10 + len(ROWS))


def expected(rows: list[int]) -> list[int]:
    """Each seeded row alone, with the full mask; -1 for rows of other requests."""
    tokens = []
    for i in rows:
        info, part = info_of([ROWS[i]]), PROBS[i : i + 1]
        keep = seeded_sampling.keep_mask(part, info.top_ks, info.top_ps, info.min_ps)
        seed = ROWS[i].sampling_params.sampling_seed
        one = seeded_sampling.seeded_sample(part, torch.tensor([seed or 0]), POSITIONS[i : i + 1], keep)
        tokens.append(-1 if seed is None else int(one))
    return tokens


def test_a_step_with_rows_of_others_does_not_synchronise() -> None:
    with SyncDetector() as detector:
        tokens = sampler.draw(stock, None, PROBS, info_of(ROWS), POSITIONS, False)
    assert tokens.tolist() == expected(list(range(len(ROWS))))
    assert not detector.found


def test_rows_after_filter_and_merge() -> None:
    info, kept = info_of(ROWS), [0, 2, 5]
    info.april = info.april.keep(kept, torch.tensor(kept)).joined(info_of([ROWS[3], ROWS[1]]).april)
    rows = [*kept, 3, 1]
    full = info_of([ROWS[i] for i in rows])
    full.april = info.april
    assert sampler.draw(stock, None, PROBS[rows], full, POSITIONS[rows], False).tolist() == expected(rows)


def test_only_filtered_rows_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_rows: list[int] = []
    mask: Callable[..., torch.Tensor] = seeded_sampling.keep_mask

    def counted(probs: torch.Tensor, *args: Any) -> torch.Tensor:
        sorted_rows.append(len(probs))
        return mask(probs, *args)

    monkeypatch.setattr(sampler, "keep_mask", counted)
    sampler.draw(stock, None, PROBS, info_of(ROWS), POSITIONS, False)
    assert sorted_rows == [2]
    sampler.draw(stock, None, PROBS[:2], info_of(ROWS[:2]), POSITIONS[:2], False)
    assert sorted_rows == [2], "the top-p of another request needs no mask for the other rows"


def test_filtered_rows_beside_others_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [i for i in range(len(ROWS)) for _ in range(4)]
    info, probs, positions = info_of([ROWS[i] for i in rows]), PROBS[rows], POSITIONS[rows]
    whole = sampler.draw(stock, None, probs, info, positions, False)
    copied: list[int] = []
    mask: Callable[..., torch.Tensor] = seeded_sampling.keep_mask
    monkeypatch.setattr(sampler, "keep_mask", lambda part, *bounds: copied.append(len(part)) or mask(part, *bounds))
    monkeypatch.setattr(seeded_sampling.reference, "SORTED_ELEMENTS", 3 * VOCAB)
    assert torch.equal(sampler.draw(stock, None, probs, info, positions, False), whole)
    assert copied == [3, 3, 2]


def test_values_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[list[int]] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: pinned.append(host.tolist()) or host)
    with SyncDetector() as detector:
        copied = host_to_device.to_device([3, 4], torch.int64, "meta")
    assert (copied.device.type, copied.dtype) == ("meta", torch.int64)
    assert pinned == [[3, 4]]
    assert not any("blocking" in call for call in detector.reviewed)


def test_tensors_of_one_copy_are_aligned_and_apart() -> None:
    columns = [list(range(i, i + 65)) for i in (0, 100, 200)]
    tensors = host_to_device.columns_to_device(columns, "cpu")
    assert [x.tolist() for x in tensors] == columns
    assert all(x.data_ptr() % 16 == tensors[0].data_ptr() % 16 and x.is_contiguous() for x in tensors)
    tensors[0].add_(1)
    assert tensors[1].tolist() == columns[1]


def test_a_resume_is_one_copy_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []

    def counted(values: Any, dtype: torch.dtype, _device: Any) -> torch.Tensor:
        copies.append(values)
        return torch.tensor(values, dtype=dtype)

    monkeypatch.setattr(host_to_device, "to_device", counted)
    monkeypatch.setattr(page_pool.SamplingBatchInfo, "from_schedule_batch", lambda *_: None)
    logprob = SimpleNamespace(top_logprobs_num=0, token_ids_logprob=None)
    reqs = [
        SimpleNamespace(req_pool_idx=i, output_ids=[30 + i], multimodal_inputs=None, logprob=logprob) for i in range(3)
    ]
    stashed: list[Any] = []
    scheduler: Any = SimpleNamespace(
        enable_overlap=False,
        future_map=SimpleNamespace(stash=lambda *args: stashed.append(args)),
        model_config=SimpleNamespace(vocab_size=VOCAB),
    )
    batch: Any = SimpleNamespace(reqs=reqs, device="cpu")
    with SyncDetector() as detector:
        page_pool._fill_decode_tensors(scheduler, batch, [4, 5, 6])
    assert len(copies) == 1
    assert not detector.found
    assert (batch.req_pool_indices.tolist(), batch.seq_lens.tolist()) == ([0, 1, 2], [4, 5, 6])
    assert (batch.orig_seq_lens.dtype, batch.orig_seq_lens.tolist()) == (torch.int32, [4, 5, 6])
    slots, payload = stashed[0]
    assert (slots.tolist(), payload.bonus_tokens.tolist()) == ([0, 1, 2], [30, 31, 32])
