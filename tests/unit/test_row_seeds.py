"""Seeds of single rows, as batches are filtered and merged."""

import torch

from sglang_april.adapter.core.sampler import RowSeeds

SEEDED = RowSeeds([True], [False], torch.tensor([[7], [1]]))
UNSEEDED = RowSeeds([False, False], [False, False], None)


def test_unseeded_rows_have_no_seed_beside_seeded_ones() -> None:
    for first, second, expected in (
        (UNSEEDED, SEEDED, [[0, 0, 7], [0, 0, 1]]),
        (SEEDED, UNSEEDED, [[7, 0, 0], [1, 0, 0]]),
    ):
        joined = first.joined(second)
        assert joined.on_device is not None
        assert joined.on_device.tolist() == expected
        assert joined.seeded == [bool(one) for one in expected[1]]


def test_a_batch_without_seeds_has_nothing_on_the_device() -> None:
    assert UNSEEDED.joined(UNSEEDED).on_device is None
    joined = SEEDED.joined(UNSEEDED)
    assert joined.keep([1, 2], torch.tensor([1, 2])).on_device is None
    kept = joined.keep([0, 2], torch.tensor([0, 2])).on_device
    assert kept is not None
    assert kept.tolist() == [[7, 0], [1, 0]]
