"""Offloading the trainer changes no bit of steps, checkpoints and exports."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from examples.tiny_model import make
from tests.bridge.reference import micro_batches
from tests.bridge.two_steps import LOSS, weights
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.trainer import Trainer, TrainerSettings
from trainer_bridge.validate import check

Weights = dict[str, np.ndarray]
Dtype = Literal["float32", "bfloat16"]


def new_trainer(model: Path, dtype: Dtype, offload: bool) -> Trainer:
    return make_trainer(TrainerSettings(model, dtype=dtype, lr=0.1, adam_eps=1.0, weight_decay=0.1, offload=offload))


def storages(trainer: Any, part: str) -> Iterator[Any]:
    """The storages of the weights, or of optimiser and gradients."""
    manager = trainer.workers.worker.policy.offload_manager
    if part == "optimizer":
        yield from manager._gradient_storages()
        weight_addresses = {tensor.untyped_storage()._cdata for tensor in manager._weights()}
        yield from (s for t in manager._states() if (s := t.untyped_storage())._cdata not in weight_addresses)
    else:
        yield from (tensor.untyped_storage() for tensor in manager._weights())


def is_offloaded(trainer: Any, part: str) -> bool:
    """Whether the storages of a part are freed: either all of them or none."""
    (offloaded,) = {storage.nbytes() == 0 for storage in storages(trainer, part)}
    return offloaded


def steps(trainer: Any, folder: Path, offload: bool) -> tuple[list[Weights], list[np.ndarray]]:
    """Three steps in the order of a colocated run, with checkpoints while everything is offloaded."""
    after = []
    for step in range(3):
        if step == 2:
            trainer.onload("weights", "optimizer")
        assert trainer.step(micro_batches(2), LOSS).grad_norm > 0
        trainer.offload("optimizer")
        assert (is_offloaded(trainer, "optimizer"), is_offloaded(trainer, "weights")) == (offload, False)
        after.append(weights(trainer, folder / f"weights-{step}"))
        trainer.offload("weights")
        assert (is_offloaded(trainer, "optimizer"), is_offloaded(trainer, "weights")) == (offload, offload)
        trainer.offload("optimizer", "weights")
        trainer.save(folder / f"saved-{step}")
        assert is_offloaded(trainer, "weights") == offload, "a checkpoint needs nothing on the device"
    logprobs = trainer.logprobs([batch.sequences for batch in micro_batches(2)])
    assert is_offloaded(trainer, "optimizer") == offload, "a forward needs the weights only"
    return after, [x.float().numpy() for x in logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_and_without_offloading_give_the_same_weights(tmp_path: Path, dtype: Dtype) -> None:
    model = Path(make(tmp_path / "qwen3", dtype=dtype))
    results = []
    for offload in (False, True):
        trainer = new_trainer(model, dtype, offload)
        try:
            results.append(steps(trainer, tmp_path / str(offload), offload))
        finally:
            trainer.close()
    again = new_trainer(model, dtype, True)
    try:
        again.offload("optimizer", "weights")
        again.load(tmp_path / "True" / "saved-1")
        again.step(micro_batches(2), LOSS)
        results.append(([*results[0][0][:2], weights(again, tmp_path / "again")], results[0][1]))
        again.offload("optimizer", "weights")
    finally:
        again.close()
    (expected, expected_logprobs), *others = results
    moved = [max(np.abs(a[name] - b[name]).max() for name in a) for a, b in pairwise(expected)]
    assert min(moved) > 1e-4, "the test would notice a skipped step"
    for after, logprobs in others:
        for got, reference in zip(after, expected, strict=True):
            assert all(np.array_equal(got[name], reference[name]) for name in reference)
        assert all(np.array_equal(a, b) for a, b in zip(logprobs, expected_logprobs, strict=True))


def test_offloading_is_used_in_colocated_runs_only() -> None:
    def config(**fields: Any) -> Config:
        return Config(hf_checkpoint="m", prompt_data="d", **fields)

    with pytest.raises(ConfigError, match=r"offload_trainer: .* needs colocate: true"):
        check(config(offload_trainer=True))
    check(config(offload_trainer=True, colocate=True))
    cases: list[tuple[bool, Literal["auto"] | bool]] = [(False, "auto"), (True, False), (True, "auto"), (True, True)]
    assert [config(colocate=c, offload_trainer=o).offloads for c, o in cases] == [False, False, True, True]
