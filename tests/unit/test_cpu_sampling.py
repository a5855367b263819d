"""Draws of the CPU platform in the place of SGLang's."""

from typing import Any

import pytest
import torch
from scipy import stats
from sglang.srt.layers import sampler

from sglang_april.cpu.platform import TorchCpuPlatform
from sglang_april.cpu.sampling import draw

PROBS = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05, 0.0])


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The platform has installed the draws, and what SGLang's own were asked for meanwhile."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sampler, "sampling_from_probs_torch", lambda *given: calls.append(given))
    for _ in range(2):
        TorchCpuPlatform().init_backend()
    return calls


@pytest.mark.usefixtures("requested")
def test_draws_have_the_given_probabilities() -> None:
    torch.manual_seed(0)
    drawn = sampler.sampling_from_probs_torch(PROBS.expand(20_000, -1))
    assert drawn.dtype == torch.int32
    counts = torch.bincount(drawn.long(), minlength=len(PROBS))
    assert counts[PROBS == 0].sum() == 0, "what is impossible is never drawn"
    possible = PROBS > 0
    assert stats.chisquare(counts[possible], 20_000 * PROBS[possible].double().numpy()).pvalue > 0.001


def test_seeded_sampling_and_other_dtypes_use_sglang(requested: list[tuple[Any, ...]]) -> None:
    seeds, positions, half = torch.arange(3), torch.arange(3), PROBS.bfloat16()
    sampler.sampling_from_probs_torch(PROBS, seeds, positions)
    sampler.sampling_from_probs_torch(half)
    assert requested == [(PROBS, seeds, positions), (half, None, None)]


def test_draw_at_the_end_returns_the_last_possible_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda rows, dtype: torch.ones(rows, dtype=dtype))
    assert draw(PROBS.repeat(3, 1)).tolist() == [4, 4, 4]
