"""Weight decay and Adam's settings: what they apply to, and that a resumed run has its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_model import make
from tests.bridge.reference import micro_batches
from tests.bridge.two_steps import LOSS, weights
from trainer_bridge.batch import MicroBatch
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.trainer import TrainerSettings


@contextmanager
def trainer_of(settings: TrainerSettings) -> Iterator[Any]:
    trainer = make_trainer(settings)
    try:
        yield trainer
    finally:
        trainer.close()


def without_gradient() -> list[MicroBatch]:
    """Micro-batches that change no weight but by weight decay."""
    return [
        replace(batch, tokens=replace(batch.tokens, advantages=batch.tokens.advantages * 0))
        for batch in micro_batches(1)
    ]


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    folder = make(tmp_path / "model", family="qwen2", dtype="float32")
    return TrainerSettings(folder, dtype="float32", lr=0.1, weight_decay=0.5)


def test_norms_and_biases_do_not_decay(settings: TrainerSettings, tmp_path: Path) -> None:
    with trainer_of(settings) as trainer:
        before = weights(trainer, tmp_path / "before")
        trainer.step(without_gradient(), LOSS)
        after = weights(trainer, tmp_path / "after")
    constant = [name for name in before if "norm" in name or name.endswith(".bias")]
    assert any("norm" in name for name in constant)
    assert any(name.endswith(".bias") for name in constant)
    for name, weight in before.items():
        expected = weight if name in constant else weight * 0.95
        np.testing.assert_allclose(after[name], expected, rtol=1e-6, err_msg=name)


def test_resumed_run_has_the_settings_of_its_configuration(settings: TrainerSettings, tmp_path: Path) -> None:
    with trainer_of(settings) as trainer:
        trainer.step(without_gradient(), LOSS)
        trainer.save(tmp_path / "saved")
        before = weights(trainer, tmp_path / "before")
    with trainer_of(replace(settings, weight_decay=0.0, adam_beta1=0.5, adam_beta2=0.6, adam_eps=1e-3)) as trainer:
        trainer.load(tmp_path / "saved")
        trainer.step(without_gradient(), LOSS)
        after = weights(trainer, tmp_path / "after")
        groups = trainer.workers.worker.policy._optimizer.param_groups
    assert all(np.array_equal(after[name], weight) for name, weight in before.items())
    assert {(group["betas"], group["eps"]) for group in groups} == {((0.5, 0.6), 1e-3)}
