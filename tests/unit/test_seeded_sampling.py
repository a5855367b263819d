"""The noise of seeded draws, against MurmurHash3 and the Gumbel trick written with Python's own integers and floats."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers import sampler

from april_kernels import seeded_sampling
from april_kernels.compiled import compiled
from april_kernels.seeded_sampling import reference
from april_kernels.seeded_sampling.reference import TOP_K_ALL, keep_mask, murmur_hash32

Sampler = Callable[..., torch.Tensor]
BOTH = pytest.mark.parametrize("seeded_sample", [reference.seeded_sample, seeded_sampling.seeded_sample])
"""The reference, and the compiled CPU implementation."""
SEEDS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 0x1234_5678_9ABC_DEF0]
POSITIONS = [0, 1, 17, 2**16, 131_071, 2**31 - 1, 5]


def murmur(words: list[int]) -> int:
    """MurmurHash3, x86, 32 bit, seed 0, over 32-bit words."""

    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    h = 0
    for word in words:
        k = rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotated(h ^ k, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def noise(seed: int, position: int, column: int) -> float:
    hashed = murmur([seed & 0xFFFFFFFF, seed >> 32, position, column])
    return -math.log(-math.log((hashed + 0.5) / 2**32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash(dtype: torch.dtype) -> None:
    columns = [0, 1, 511, 151_935]
    hashed = murmur_hash32(torch.tensor(SEEDS), torch.tensor(POSITIONS, dtype=dtype), torch.tensor(columns))
    assert hashed.tolist() == [
        [murmur([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(SEEDS, POSITIONS, strict=True)
    ]


@BOTH
def test_draw(seeded_sample: Sampler) -> None:
    rng = random.Random(0)
    rows = [[rng.random() ** 4 for _ in range(50)] for _ in SEEDS]
    probs = torch.tensor(rows)
    probs /= probs.sum(-1, keepdim=True)
    probs[:, 3] = 0.0
    before = probs.clone()
    expected = [
        max(
            (column for column in range(50) if row[column] > 0),
            key=lambda column: math.log(row[column]) + noise(seed, position, column),
        )
        for row, seed, position in zip(probs.tolist(), SEEDS, POSITIONS, strict=True)
    ]
    drawn = seeded_sample(probs, torch.tensor(SEEDS), torch.tensor(POSITIONS))
    assert drawn.tolist() == expected
    assert torch.equal(probs, before)


@BOTH
def test_draw_is_independent_of_other_rows(seeded_sample: Sampler) -> None:
    torch.manual_seed(0)
    probs, seeds, positions = torch.rand(7, 64), torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = seeded_sample(probs, seeds, positions)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(seeded_sample(probs[one], seeds[one], positions[one]), whole[one])


@pytest.mark.parametrize(("columns", "sharpness"), [(1, 1), (50, 0), (512, 1), (512, 6), (5000, 3)])
def test_compiled_draws_match_reference(columns: int, sharpness: int) -> None:
    torch.manual_seed(columns + sharpness)
    for _ in range(20):
        probs = (torch.randn(64, columns) * sharpness).softmax(dim=-1)
        given = probs, torch.randint(0, 2**63 - 1, (64,)), torch.randint(0, 2**31 - 1, (64,), dtype=torch.int32)
        keep = torch.rand_like(probs) < 0.3
        keep[:, 0] = True
        assert torch.equal(seeded_sampling.seeded_sample(*given), reference.seeded_sample(*given))
        assert torch.equal(seeded_sampling.seeded_sample(*given, keep), reference.seeded_sample(*given, keep))


def test_compiles_without_a_writable_cache_directory() -> None:
    reported: dict[str, Any] = {}
    exec("def fill(out, value): out[:] = value", reported)
    answer = np.zeros(3, np.float32)
    compiled("(f4[::1], f4)")(reported["fill"])(answer, 3.0)
    assert answer.tolist() == [3, 3, 3]


@pytest.fixture
def cuts() -> tuple[torch.Tensor, ...]:
    """Rows with every combination of top-k, top-p and min-p, on and off: probs, top_ks, top_ps, min_ps."""
    torch.manual_seed(0)
    rows = [(k, p, m) for k in (1, 3, 40, TOP_K_ALL) for p in (0.05, 0.5, 0.9, 0.999) for m in (0.0, 0.02, 0.3, 1.0)]
    top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*rows, strict=True))
    return (torch.randn(len(rows), 200) * 2).softmax(dim=-1), top_ks, top_ps, min_ps


def test_masks_match_sglang(cuts: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeded rows keep the columns that SGLang's own sampler would draw from."""
    seen: list[torch.Tensor] = []
    draw = torch.multinomial

    def record(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        seen.append(weights.clone())
        return draw(weights, num_samples)

    monkeypatch.setattr(torch, "multinomial", record)
    probs, top_ks, top_ps, min_ps = cuts
    sampler.top_k_top_p_min_p_sampling_from_probs_torch(probs.clone(), top_ks, top_ps, min_ps, True, None, None)
    order = probs.sort(dim=-1, descending=True).indices
    sglang_mask = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, order, seen[0] > 0)
    assert torch.equal(keep_mask(probs, top_ks, top_ps, min_ps), sglang_mask)
    assert 1 < int(sglang_mask.sum(-1).max()) <= 200


@BOTH
def test_draws_stay_within_the_mask(cuts: tuple[torch.Tensor, ...], seeded_sample: Sampler) -> None:
    probs, *bounds = cuts
    keep = keep_mask(probs, *bounds)
    for seed in range(50):
        drawn = seeded_sample(probs, torch.arange(len(probs)) + 1000 * seed, torch.zeros(len(probs)), keep)
        assert bool(keep.gather(1, drawn[:, None]).all())


@BOTH
def test_masked_rows_keep_their_proportions(seeded_sample: Sampler) -> None:
    """Chi-square over the 4 columns that are left, 3 degrees of freedom: below 16.3 in 999 of 1,000 cases."""
    count = 20_000
    probs = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    whole = probs.repeat(count, 1)
    full = torch.ones(count)
    keep = keep_mask(whole, torch.full((count,), 4), full, 0 * full)
    drawn = seeded_sample(whole, torch.arange(count), torch.full((count,), 7), keep)
    expected = probs[:4] / probs[:4].sum() * count
    seen = torch.bincount(drawn, minlength=6)
    assert seen[4:].tolist() == [0, 0]
    assert float(((seen[:4] - expected) ** 2 / expected).sum()) < 16.3
