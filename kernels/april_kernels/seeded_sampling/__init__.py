"""Sampling with a counter-based generator: the noise of a token depends on (seed, position, column) alone."""

import torch

from april_kernels.seeded_sampling import reference
from april_kernels.seeded_sampling.reference import TOP_K_ALL, keep_mask, murmur_hash32, sorted_rows

__all__ = ["TOP_K_ALL", "keep_mask", "murmur_hash32", "seeded_sample", "sorted_rows", "warm_up"]


def seeded_sample(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """One column per row by the Gumbel trick: `reference.seeded_sample`, on a GPU (CUDA or ROCm) in a fused kernel, on
    a CPU in a compiled loop."""
    # Imported where they are needed: a CPU installation of torch has no Triton.
    if probs.is_cuda:
        from april_kernels.seeded_sampling import triton_impl

        return triton_impl.seeded_sample(probs, seeds, positions, keep)
    if probs.dtype is torch.float32 and probs.device.type == "cpu":
        from april_kernels.seeded_sampling import cpu

        return cpu.seeded_sample(probs, seeds, positions, keep)
    return reference.seeded_sample(probs, seeds, positions, keep)


def warm_up(columns: int, device: torch.device | str) -> None:
    """Compile what draws from rows of `columns`, with and without a mask, ahead of the first round."""
    probs = torch.full((2, columns), 1 / columns, device=device)
    seeds = torch.zeros(2, dtype=torch.int64, device=device)
    for keep in (None, torch.ones_like(probs, dtype=torch.bool)):
        seeded_sample(probs, seeds, seeds, keep)
