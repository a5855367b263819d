"""Two recorded steps of a trainer, which must be the same for any number of ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.bridge.reference import micro_batches
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.megatron.convert import convert
from trainer_bridge.trainer import StepReport, TrainerSettings

TOLERANCE = 1e-5
LOSS = LossSettings(algorithm="dapo", correction="tis", proximal="trainer")
COUNTS = (3, 1)
"""Micro-batches of the two steps: first one replica has more of them than the other, then one has none."""


@dataclass(frozen=True)
class TwoSteps:
    """The results of two steps."""

    reports: list[StepReport]
    logprobs: list[np.ndarray]
    weights: list[dict[str, np.ndarray]]
    """After each step."""


def settings(folder: Path, **fields: Any) -> TrainerSettings:
    """Adam's first step is lr · g / (|g| + eps), so with these settings weights change by about the gradient."""
    return TrainerSettings(hf_checkpoint=folder, dtype="float32", lr=1.0, adam_eps=1.0, clip_grad=0.5, **fields)


def weights(trainer: Any, folder: Path) -> dict[str, np.ndarray]:
    """By Hugging Face names."""
    trainer.save(folder / "trainer")
    convert(folder / "trainer", trainer.settings.hf_checkpoint, folder)
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def train_two_steps(trainer: Any, folder: Path) -> TwoSteps:
    """Take two steps; `saved` then contains the checkpoint between them."""
    reports, after = [], []
    for number, count in enumerate(COUNTS):
        trainer.save(folder / "saved")
        reports.append(trainer.step(micro_batches(count), LOSS))
        after.append(weights(trainer, folder / f"weights-{number}"))
    logprobs = [x.numpy() for x in trainer.logprobs([batch.sequences for batch in micro_batches(3)])]
    return TwoSteps(reports, logprobs, after)


def check_step(got: StepReport, expected: StepReport) -> None:
    assert got.applied
    assert got.grad_norm > 0.5, "the norm must be clipped"
    for name in ("loss", "grad_norm", "lr"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=TOLERANCE, abs=TOLERANCE)
    row, expected_row = got.stats.row(), expected.stats.row()
    assert row.keys() == expected_row.keys()
    assert all(row[name] == pytest.approx(expected_row[name], rel=1e-4, abs=TOLERANCE) for name in row)
    assert len(got.sequences) == len(expected.sequences)
    for a, b in zip(got.sequences, expected.sequences, strict=True):
        assert (a.tokens.tolist(), a.clipped.tolist()) == (b.tokens.tolist(), b.clipped.tolist())
        np.testing.assert_allclose(a.pull, b.pull, rtol=1e-4, atol=TOLERANCE)


def check_weights(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.abs(got[name] - weight).max() < TOLERANCE, name
