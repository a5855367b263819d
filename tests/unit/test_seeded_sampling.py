"""The noise of seeded draws, against MurmurHash3 and the Gumbel trick written with Python's own integers and floats."""

import math
import random

import pytest
import torch

from april_kernels.seeded_sampling.reference import murmur_hash32, seeded_sample

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


def test_draw() -> None:
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


def test_a_row_s_draw_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    probs, seeds, positions = torch.rand(7, 64), torch.tensor(SEEDS), torch.tensor(POSITIONS)
    whole = seeded_sample(probs, seeds, positions)
    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(seeded_sample(probs[one], seeds[one], positions[one]), whole[one])
