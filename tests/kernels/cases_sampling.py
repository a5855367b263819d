"""The sampling kernel against the reference: the same column for every row. Started by test_kernels.py."""

import pytest
import torch
import triton
import triton.language as tl

from april_kernels.seeded_sampling import reference, triton_impl
from tests.kernels.pools import huge


@triton.jit
def hash_kernel(seeds_ptr, positions_ptr, hashes_ptr, columns, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201, N803
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    hashes = triton_impl._hash(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), column)
    tl.store(hashes_ptr + row * columns + column, hashes.to(tl.int64), mask=column < columns)


def rows_of(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    probs = (torch.randn(rows, columns, generator=generator) * 3).softmax(dim=-1)
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (rows,), generator=generator, dtype=torch.int32)
    return probs.to(device), seeds.to(device), positions.to(device)


def test_hash_matches_reference(device: str) -> None:
    _, seeds, positions = rows_of(8, 100, device)
    seeds[0], seeds[1], positions[0] = 0, 2**63 - 1, 0
    hashes = torch.full((8, 100), -1, dtype=torch.int64, device=device)
    hash_kernel[(8,)](seeds, positions, hashes, 100, BLOCK=128)
    assert torch.equal(hashes, reference.murmur_hash32(seeds, positions, torch.arange(100, device=device)))


@pytest.mark.parametrize("positions_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("columns", [1, 7, 1024, 3001])
def test_draws_match_reference(columns: int, positions_type: torch.dtype, device: str) -> None:
    probs, seeds, positions = rows_of(8, columns, device)
    positions = positions.to(positions_type)
    expected = reference.seeded_sample(probs, seeds, positions)
    assert torch.equal(triton_impl.seeded_sample(probs, seeds, positions), expected)


@pytest.mark.parametrize("top_k", [1, 5, 50])
def test_masked_draws_match_reference(top_k: int, device: str) -> None:
    probs, seeds, positions = rows_of(8, 2500, device)
    full = torch.full((8,), 1.0, device=device)
    keep = reference.keep_mask(probs, torch.full((8,), top_k, device=device), 0.9 * full, 0.01 * full)
    draws = triton_impl.seeded_sample(probs, seeds, positions, keep)
    assert torch.equal(draws, reference.seeded_sample(probs, seeds, positions, keep))
    assert bool(keep.gather(1, draws[:, None]).all())


def test_impossible_columns_are_never_drawn(device: str) -> None:
    probs, seeds, positions = rows_of(8, 3000, device)
    probs[:, 3:] = 0
    probs[:4, :3], probs[:4, 2990] = 0, 1
    draws = triton_impl.seeded_sample(probs, seeds, positions)
    assert torch.equal(draws, reference.seeded_sample(probs, seeds, positions))
    assert bool((draws[:4] == 2990).all())


def test_rows_may_be_strided_and_of_half_precision(device: str) -> None:
    probs, seeds, positions = rows_of(6, 3000, device)
    wide = probs.to(torch.float16)[:, :2500]
    keep = torch.ones(6, 4000, dtype=torch.bool, device=device)[:, 1000:3500]
    keep[:, 100:] = False
    expected = reference.seeded_sample(wide, seeds, positions, keep)
    assert torch.equal(triton_impl.seeded_sample(wide, seeds, positions, keep), expected)


def test_no_rows(device: str) -> None:
    probs, seeds, positions = rows_of(1, 8, device)
    assert triton_impl.seeded_sample(probs[:0], seeds[:0], positions[:0]).shape == (0,)


def test_bad_shapes_are_refused(device: str) -> None:
    probs, seeds, positions = rows_of(4, 8, device)
    with pytest.raises(ValueError, match="probs must be"):
        triton_impl.seeded_sample(probs.T, seeds, positions)
    with pytest.raises(ValueError, match="keep must be"):
        triton_impl.seeded_sample(probs, seeds, positions, torch.ones(4, 9, dtype=torch.bool, device=device))


def test_rows_beyond_2_31_elements(device: str) -> None:
    """Rows so far apart that the last one begins beyond 2**31 elements, in the probabilities and in the mask."""
    probs, seeds, positions = rows_of(3, 2000, device)
    stride = 2**30 + 4096
    far = huge(3 * stride, device).view(torch.float32).view(3, stride)[:, :2000]
    far.copy_(probs)
    full = torch.ones(3, device=device)
    keep = reference.keep_mask(probs, torch.full((3,), 20, device=device), full, 0 * full)
    far_keep = huge(3 * stride // 4, device).view(torch.bool).view(3, stride)[:, :2000]
    far_keep.copy_(keep)
    assert torch.equal(
        triton_impl.seeded_sample(far, seeds, positions), reference.seeded_sample(probs, seeds, positions)
    )
    draws = triton_impl.seeded_sample(far, seeds, positions, far_keep)
    assert torch.equal(draws, reference.seeded_sample(probs, seeds, positions, keep))
