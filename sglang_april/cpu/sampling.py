"""Sampling for the CPU platform: like `torch.multinomial`, without an exponential for every column of every row.

It replaces SGLang's sampling without seeds. The plugin's seeded sampling is compiled too, so comparisons between a
stock server and the plugin on this platform do not measure the sampler.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.layers import sampler

from april_kernels.compiled import compiled


def install() -> None:
    """Replace SGLang's function; called in each worker."""
    if not isinstance(sampler.sampling_from_probs_torch, functools.partial):
        sampler.sampling_from_probs_torch = functools.partial(_sample, sampler.sampling_from_probs_torch)


def _sample(
    stock: Callable[..., torch.Tensor],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    if sampling_seed is not None or probs.dtype != torch.float32:
        return stock(probs, sampling_seed, positions)
    return draw(probs)


def draw(probs: torch.Tensor) -> torch.Tensor:
    """A column of each row, int32 [rows], by torch's random numbers. `probs` float32 [rows, columns], each ≥ 0."""
    out = torch.empty(len(probs), dtype=torch.int32)
    _draw(probs.contiguous().numpy(), torch.rand(len(probs), dtype=torch.float64).numpy(), out.numpy())
    return out


@compiled("(f4[:,::1], f8[::1], i4[::1])")
def _draw(probs: NDArray[np.float32], uniform: NDArray[np.float64], out: NDArray[np.int32]) -> None:
    """The first column at which the cumulative sum exceeds a uniform share of the whole."""
    rows, columns = probs.shape
    for row in range(rows):
        total = 0.0
        for column in range(columns):
            total += np.float64(probs[row, column])
        bar, total, chosen = uniform[row] * total, 0.0, 0
        for column in range(columns):
            if probs[row, column] > 0:
                # By rounding the sum may end at the bar; then the last possible column is chosen.
                chosen = column
                total += np.float64(probs[row, column])
                if total > bar:
                    break
        out[row] = chosen
