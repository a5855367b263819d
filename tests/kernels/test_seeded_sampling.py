"""Seeded sampling in torch: what it draws, and on what a draw depends."""

from typing import Any

import pytest
import torch

from april_kernels.seeded_sampling import TOP_K_ALL, keep_mask, murmur_hash32, reference, seeded_sample


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-square over 8 columns, 7 degrees of freedom: below 24.3 in 999 of 1,000 choices of seeds; these are fixed."""
    draws_wanted = 20_000
    probs = torch.tensor([0.4, 0.2, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02])
    seeds = torch.arange(draws_wanted)
    draws = seeded_sample(probs.repeat(draws_wanted, 1), seeds, torch.zeros_like(seeds))
    expected = probs * draws_wanted
    seen = torch.bincount(draws, minlength=8)
    assert float(((seen - expected) ** 2 / expected).sum()) < 24.3


def test_draw_depends_only_on_its_row() -> None:
    probs = torch.randn(6, 500).softmax(dim=-1)
    seeds, positions = torch.arange(6) * 10**15, torch.arange(6) * 1000
    together = seeded_sample(probs, seeds, positions)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    assert torch.equal(seeded_sample(probs[order], seeds[order], positions[order]), together[order])
    assert torch.equal(seeded_sample(probs[3:4], seeds[3:4], positions[3:4]), together[3:4])


def test_draw_depends_on_all_seed_bits_and_position() -> None:
    seeds = torch.tensor([1, 1 + (1 << 32), 1, 2])
    hashes = murmur_hash32(seeds, torch.tensor([0, 0, 1, 0]), torch.arange(100))
    assert len({tuple(row) for row in hashes.tolist()}) == 4


def test_keep_mask_applies_each_bound() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).repeat(4, 1)
    top_ks, top_ps = torch.tensor([2, TOP_K_ALL, TOP_K_ALL, 1]), torch.tensor([1.0, 0.6, 1.0, 0.01])
    keep = keep_mask(probs, top_ks, top_ps, torch.tensor([0.0, 0.0, 0.2, 0.9]))
    assert keep.tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [True] * 3 + [False],
        [True] + [False] * 3,
    ]


@pytest.mark.parametrize("at_once", [1, 3, 7, 100])
def test_keep_mask_sorts_a_bounded_number_of_rows_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 20, 300
    noise = torch.Generator().manual_seed(2)
    bounds = (
        torch.randint(1, 2 * columns, (rows,), generator=noise),
        torch.rand(rows, generator=noise).add_(0.2).clamp_(max=1.0),
        torch.rand(rows, generator=noise) * 0.02,
    )
    probs = torch.randn(rows, columns, generator=noise).mul_(2).softmax(dim=-1)
    whole = keep_mask(probs, *bounds)
    alone = [keep_mask(probs[i : i + 1], *(bound[i : i + 1] for bound in bounds)) for i in range(rows)]
    assert torch.equal(torch.cat(alone), whole)

    sizes = list[int]()
    sort = torch.Tensor.sort

    def counted(values: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(values.numel())
        return sort(values, *args, **options)

    monkeypatch.setattr(torch.Tensor, "sort", counted)
    monkeypatch.setattr(reference, "SORTED_ELEMENTS", at_once * columns + columns - 1)
    assert torch.equal(keep_mask(probs, *bounds), whole)
    assert max(sizes) <= at_once * columns
    assert sum(sizes) == rows * columns
