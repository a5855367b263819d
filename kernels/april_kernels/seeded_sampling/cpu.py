"""Seeded sampling on a CPU, compiled: `reference.seeded_sample` in one pass, with a logarithm for few columns only."""

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from april_kernels.compiled import compiled

_SURELY = 1 - 1e-12
"""A column that loses by less is compared exactly: the bound is rounded, too."""
_ALL = np.empty((0, 0), np.bool_)


def seeded_sample(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """As `reference.seeded_sample`, for float32 probabilities."""
    out = torch.empty(len(probs), dtype=torch.int64)
    kept = _ALL if keep is None else keep.numpy()
    _sample(probs.contiguous().numpy(), seeds.numpy(), positions.long().numpy(), kept, out.numpy())
    return out


@numba.njit
def _absorb(h: np.uint32, block: np.uint32) -> np.uint32:
    """A scrambled 32-bit block into the state of MurmurHash3."""
    h ^= block
    return np.uint32(np.uint32((h << np.uint32(13)) | (h >> np.uint32(19))) * np.uint32(5) + np.uint32(0xE6546B64))


@numba.njit
def _scramble(block: np.uint32) -> np.uint32:
    k = np.uint32(block * np.uint32(0xCC9E2D51))
    return np.uint32(np.uint32((k << np.uint32(15)) | (k >> np.uint32(17))) * np.uint32(0x1B873593))


@numba.njit
def _finish(h: np.uint32) -> np.uint32:
    h ^= np.uint32(16)
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@compiled("(f4[:,::1], i8[:], i8[:], b1[:,:], i8[::1])")
def _sample(
    probs: NDArray[np.float32],
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    keep: NDArray[np.bool_],
    out: NDArray[np.int64],
) -> None:
    rows, columns = probs.shape
    scrambled = np.empty(columns, np.uint32)
    for column in range(columns):
        scrambled[column] = _scramble(np.uint32(column))
    for row in range(rows):
        state = np.uint32(0)
        for block in (seeds[row] & 0xFFFFFFFF, seeds[row] >> 32 & 0xFFFFFFFF, positions[row] & 0xFFFFFFFF):
            state = _absorb(state, _scramble(np.uint32(block)))
        # argmax of log p - log(-log u) is that of p / -log u, and -log u ≥ 1 - u.
        best, chosen = 0.0, 0
        for column in range(columns):
            p = np.float64(probs[row, column])
            u = (_finish(_absorb(state, scrambled[column])) + 0.5) / 4294967296.0
            if p > best * (1 - u) * _SURELY and (keep.size == 0 or keep[row, column]):
                score = p / -np.log(u)
                if score > best:
                    best, chosen = score, column
        out[row] = chosen
