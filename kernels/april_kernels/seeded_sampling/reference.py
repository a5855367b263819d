"""Seeded sampling in plain torch: the CPU path, and the reference for faster implementations.

The hash is MurmurHash3 (x86, 32 bit) over four 32-bit blocks: seed low, seed high, position, column, as in SGLang's
deterministic sampler (`sglang/kernels/ops/sampling/murmur_hash.py`), so the noise of a token is independent of slot,
rank and batch. Unlike there, the hash is mapped to the open interval (0, 1): a hash of 2**32 - 1 would otherwise give
infinite noise, which draws any column, once in about 28,000 tokens with a vocabulary of 152k.
"""

import torch

_MASK = 0xFFFFFFFF
TOP_K_ALL = 1 << 30
SORTED_ELEMENTS = 1 << 23
"""Elements sorted at once, 55 rows of 152k columns: on a CPU a sort takes about 20 bytes of each, 170 MB."""


def _rotl(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rotated left; only the low 32 bits of the result count."""
    return (x << bits) | (x >> (32 - bits))


def _scramble(block: torch.Tensor) -> torch.Tensor:
    """Blocks before they enter the state, of whose int64 the low 32 bits count; the result is in [0, 2**32)."""
    return _rotl(block * 0xCC9E2D51 & _MASK, 15) * 0x1B873593 & _MASK


def _absorb(h: torch.Tensor, scrambled: torch.Tensor) -> torch.Tensor:
    """A scrambled block into the state `h`, broadcast together."""
    return _rotl(h ^ scrambled, 13).mul_(5).add_(0xE6546B64).bitwise_and_(_MASK)


def murmur_hash32(seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash of every (row, column).

    Args:
        seeds: int64 [rows], 63 bits used.
        positions: int [rows], absolute positions.
        columns: int64 [columns].

    Returns:
        int64 [rows, columns], values in [0, 2**32).
    """
    seeds, positions = seeds.to(torch.int64), positions.to(torch.int64)
    h = torch.zeros_like(seeds)
    for block in _scramble(torch.stack((seeds, seeds >> 32, positions))):
        h = _absorb(h, block)
    # In place: this is the only part that is as large as the logits.
    h = _absorb(h[:, None], _scramble(columns.to(torch.int64))).bitwise_xor_(16)
    h.bitwise_xor_(h >> 16).mul_(0x85EBCA6B).bitwise_and_(_MASK)
    h.bitwise_xor_(h >> 13).mul_(0xC2B2AE35).bitwise_and_(_MASK)
    return h.bitwise_xor_(h >> 16)


def keep_mask(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Columns that top-k, top-p and min-p keep, in SGLang's order: k, then p over the full row, then min-p.

    Args:
        probs: float [rows, columns], each row sums to 1.
        top_ks: int [rows]; `TOP_K_ALL` (or more than the columns) keeps all.
        top_ps: float [rows]; 1 keeps all, regardless of rounding in the sum.
        min_ps: float [rows]; relative to the largest probability; 0 keeps all.

    Returns:
        bool [rows, columns]; at least one column of every row.
    """
    keep, at_once = torch.empty_like(probs, dtype=torch.bool), sorted_rows(probs)
    for i in range(0, len(probs), at_once):
        part = slice(i, i + at_once)
        keep[part] = _keep_mask(probs[part], top_ks[part], top_ps[part], min_ps[part])
    return keep


def sorted_rows(probs: torch.Tensor) -> int:
    """Rows that `keep_mask` sorts at once."""
    return max(1, SORTED_ELEMENTS // probs.shape[1])


def _keep_mask(probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    ordered, columns = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    rank = torch.arange(probs.shape[1], device=probs.device)[None, :]
    keep = rank < top_ks[:, None].to(torch.int64)
    keep &= (before <= top_ps[:, None]) | (top_ps[:, None] >= 1)
    keep &= ordered >= ordered[:, :1] * min_ps[:, None]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, columns, keep)


def seeded_sample(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """One column per row by the Gumbel trick, in float64: argmax(log p - log(-log u)).

    Args:
        probs: float [rows, columns]; zero columns are never drawn.
        seeds: int64 [rows].
        positions: int [rows], absolute position of the token each row was computed from.
        keep: bool [rows, columns] from `keep_mask`, or None for all columns.

    Returns:
        int64 [rows].
    """
    columns = torch.arange(probs.shape[1], device=probs.device)
    noise = murmur_hash32(seeds, positions, columns).to(torch.float64).add_(0.5).div_(2.0**32)
    score = probs.to(torch.float64).log_().sub_(noise.log_().neg_().log_())
    if keep is not None:
        score.masked_fill_(~keep, -torch.inf)
    return score.argmax(dim=-1)
