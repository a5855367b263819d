# ruff: noqa: ANN001, ANN201, ANN202, N803 (Triton's own conventions: arguments by comment, constexpr in capitals)
# mypy: disable-error-code=no-untyped-def
"""Seeded sampling on a GPU: hash, noise and argmax in one pass over the probabilities.

The reference takes argmax(log p - log(-log u)). The same column maximises p / -log u, which costs one logarithm and one
division instead of three logarithms. Both are taken in float64, so the draws are the reference's, except where the two
best scores of a row agree to rounding (some 1e-15 of them). Blocks without a possible column are skipped: after top-k
or top-p, most of a row.

A row is split into blocks of columns, so that a few rows fill a GPU too; a second kernel selects each row's best block.
"""

import contextlib

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def _mix(h, k):
    """One 32-bit block `k` into the state `h` of MurmurHash3; uint32, wrapping."""
    k *= 0xCC9E2D51
    k = ((k << 15) | (k >> 17)) * 0x1B873593
    h ^= k
    return ((h << 13) | (h >> 19)) * 5 + 0xE6546B64


@triton.jit
def _hash(seed, position, columns):
    """`reference.murmur_hash32` of one row: uint32 [columns]."""
    h = _mix(tl.zeros_like(columns).to(tl.uint32), seed.to(tl.uint32))
    h = _mix(h, (seed >> 32).to(tl.uint32))
    h = _mix(h, position.to(tl.uint32))
    h = _mix(h, columns.to(tl.uint32)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit(do_not_specialize_on_alignment=("seeds_ptr", "positions_ptr"))
def block_best_kernel(
    probs_ptr,  # float [rows, columns]
    keep_ptr,  # bool [rows, columns]; None: all columns
    seeds_ptr,  # int64 [rows]
    positions_ptr,  # int32 or int64 [rows]
    scores_ptr,  # float64 [rows, blocks], written: the best score of each block, -1 where none is possible
    best_ptr,  # int32 [rows, blocks], written: its column, the first of equals
    columns,
    probs_stride,
    keep_stride,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    probs = tl.load(probs_ptr + row.to(tl.int64) * probs_stride + column, mask=inside, other=0.0).to(tl.float64)
    possible = probs > 0
    if keep_ptr is not None:
        kept = tl.load(keep_ptr + row.to(tl.int64) * keep_stride + column, mask=inside, other=0)
        possible = possible & (kept != 0)
    score = tl.full((), -1.0, tl.float64)
    best = block * BLOCK
    if tl.max(possible.to(tl.int32), axis=0) != 0:
        noise = (
            _hash(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), column).to(tl.float64) + 0.5
        ) / 4294967296.0
        scores = tl.where(possible, probs / -tl.log(noise), -1.0)
        score, at = tl.max(scores, axis=0, return_indices=True)
        best += at
    tl.store(scores_ptr + row * tl.num_programs(1) + block, score)
    tl.store(best_ptr + row * tl.num_programs(1) + block, best)


@triton.jit
def row_best_kernel(scores_ptr, best_ptr, tokens_ptr, blocks, BLOCKS: tl.constexpr):
    """tokens int64 [rows]: the column of each row's best block, the first of equals."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    scores = tl.load(scores_ptr + row * blocks + block, mask=block < blocks, other=-2.0)
    winner = tl.argmax(scores, axis=0)
    tl.store(tokens_ptr + row, tl.load(best_ptr + row * blocks + winner).to(tl.int64))


def seeded_sample(
    probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | None = None
) -> torch.Tensor:
    """See `reference.seeded_sample`. Each row of `probs` and `keep` must be contiguous; row strides may be any."""
    for name, tensor in (("probs", probs), ("keep", keep)):
        if tensor is not None and (tensor.ndim != 2 or tensor.shape != probs.shape or tensor.stride(1) != 1):
            raise ValueError(f"{name} must be [rows, columns] with contiguous rows, got {list(tensor.shape)}")
    rows, columns = probs.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=probs.device)
    if not rows:
        return tokens
    blocks = triton.cdiv(columns, BLOCK)
    scores = torch.empty((rows, blocks), dtype=torch.float64, device=probs.device)
    best = torch.empty((rows, blocks), dtype=torch.int32, device=probs.device)
    with torch.cuda.device(probs.device) if probs.is_cuda else contextlib.nullcontext():
        block_best_kernel[(rows, blocks)](
            probs,
            None if keep is None else keep.view(torch.uint8),
            seeds.to(torch.int64).contiguous(),
            positions.contiguous(),
            scores,
            best,
            columns,
            probs.stride(0),
            0 if keep is None else keep.stride(0),
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        row_best_kernel[(rows,)](scores, best, tokens, blocks, BLOCKS=triton.next_power_of_2(blocks))
    return tokens
