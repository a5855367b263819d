"""The trainer's memory goes to the host and comes back: steps, checkpoints and exports are bit for bit the same."""

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


def trainer(model: Path, dtype: Dtype, offload: bool) -> Trainer:
    return make_trainer(TrainerSettings(model, dtype=dtype, lr=0.1, adam_eps=1.0, weight_decay=0.1, offload=offload))


def storages(made: Any, part: str) -> Iterator[Any]:
    """Of the weights, or of the optimiser and the gradients."""
    memory = made._ranks._rank._policy._memory
    if part == "optimizer":
        yield from memory._gradient_storages()
        own = {tensor.untyped_storage()._cdata for tensor in memory._weights()}
        yield from (s for t in memory._states() if (s := t.untyped_storage())._cdata not in own)
    else:
        yield from (tensor.untyped_storage() for tensor in memory._weights())


def gone(made: Any, part: str) -> bool:
    """Whether a part's memory is free; it must not be half free."""
    (answer,) = {storage.nbytes() == 0 for storage in storages(made, part)}
    return answer


def steps(made: Any, folder: Path, offload: bool) -> tuple[list[Weights], list[np.ndarray]]:
    """Three steps, each in colocated order; a checkpoint while all is away."""
    after = []
    for step in range(3):
        if step == 2:
            made.onload("weights", "optimizer")
        assert made.step(micro_batches(2), LOSS).grad_norm > 0
        made.offload("optimizer")
        assert (gone(made, "optimizer"), gone(made, "weights")) == (offload, False)
        after.append(weights(made, folder / f"weights-{step}"))
        made.offload("weights")
        assert (gone(made, "optimizer"), gone(made, "weights")) == (offload, offload)
        made.offload("optimizer", "weights")
        made.save(folder / f"saved-{step}")
        assert gone(made, "weights") == offload, "a checkpoint needs none of it on the device"
    logprobs = made.logprobs([batch.sequences for batch in micro_batches(2)])
    assert gone(made, "optimizer") == offload, "a forward needs the weights alone"
    return after, [x.float().numpy() for x in logprobs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_with_and_without_it_gives_the_same_weights(tmp_path: Path, dtype: Dtype) -> None:
    model = Path(make(tmp_path / "qwen3", dtype=dtype))
    told = []
    for offload in (False, True):
        made = trainer(model, dtype, offload)
        try:
            told.append(steps(made, tmp_path / str(offload), offload))
        finally:
            made.close()
    again = trainer(model, dtype, True)
    try:
        again.offload("optimizer", "weights")
        again.load(tmp_path / "True" / "saved-1")
        again.step(micro_batches(2), LOSS)
        told.append(([*told[0][0][:2], weights(again, tmp_path / "again")], told[0][1]))
        again.offload("optimizer", "weights")
    finally:
        again.close()
    (expected, expected_logprobs), *others = told
    moved = [max(np.abs(a[name] - b[name]).max() for name in a) for a, b in pairwise(expected)]
    assert min(moved) > 1e-4, "a step that is left out would be seen"
    for after, logprobs in others:
        for mine, theirs in zip(after, expected, strict=True):
            assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
        assert all(np.array_equal(a, b) for a, b in zip(logprobs, expected_logprobs, strict=True))


def test_it_is_asked_for_where_it_makes_room() -> None:
    def made(**fields: Any) -> Config:
        return Config(hf_checkpoint="m", prompt_data="d", **fields)

    with pytest.raises(ConfigError, match=r"offload_trainer: .* needs colocate: true"):
        check(made(offload_trainer=True))
    check(made(offload_trainer=True, colocate=True))
    asked: list[tuple[bool, Literal["auto"] | bool]] = [(False, "auto"), (True, False), (True, "auto"), (True, True)]
    assert [made(colocate=c, offload_trainer=o).offloads for c, o in asked] == [False, False, True, True]
