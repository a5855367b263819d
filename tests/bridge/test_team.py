"""Teams of trainer processes: two ranks take the step that one takes, and the death of one is said and survived."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.tiny_model import make
from tests.bridge.reference import micro_batches
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.megatron.team import Team, TrainerFailed
from trainer_bridge.trainer import StepReport, TrainerSettings, make_trainer

LIMIT = 1e-5
LOSS = LossSettings(algorithm="dapo", correction="tis", proximal="trainer")
COUNTS = (3, 1)
"""Micro-batches of the two steps: one replica has more of them than the other, then one has none."""


@dataclass(frozen=True)
class Told:
    """All that a trainer says of two steps."""

    reports: list[StepReport]
    logprobs: list[np.ndarray]
    weights: list[dict[str, np.ndarray]]
    """After each step."""


def settings(folder: Path, **ranks: int) -> TrainerSettings:
    """Adam's first step is lr · g / (|g| + eps), so here the weights move by about the gradient itself."""
    return TrainerSettings(hf_checkpoint=folder, dtype="float32", lr=1.0, adam_eps=1.0, clip_grad=0.5, **ranks)


def weights(trainer: Any, folder: Path) -> dict[str, np.ndarray]:
    trainer.export(folder)
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def tell(trainer: Any, folder: Path) -> Told:
    """Two steps; what is needed to take the second one again lies under `saved` afterwards."""
    reports, after = [], []
    for number, count in enumerate(COUNTS):
        trainer.save(folder / "saved")
        reports.append(trainer.step(micro_batches(count), LOSS))
        after.append(weights(trainer, folder / f"weights-{number}"))
    logprobs = [x.numpy() for x in trainer.logprobs([batch.sequences for batch in micro_batches(3)])]
    return Told(reports, logprobs, after)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make(tmp_path_factory.mktemp("model") / "qwen3", dtype="float32"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One process."""
    trainer = make_trainer(settings(model))
    try:
        return tell(trainer, tmp_path_factory.mktemp("alone"))
    finally:
        trainer.close()


@pytest.fixture
def team(request: pytest.FixtureRequest, model: Path) -> Iterator[Team]:
    made: Any = make_trainer(settings(model, world_size=2, **request.param))
    yield made
    made.close()


def check_step(got: StepReport, expected: StepReport) -> None:
    assert got.applied
    assert got.grad_norm > 0.5, "so that the clip of the norm is at work"
    for name in ("loss", "grad_norm", "lr"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=LIMIT, abs=LIMIT)
    mine, theirs = got.stats.row(), expected.stats.row()
    assert mine.keys() == theirs.keys()
    assert all(mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=LIMIT) for name in mine)
    assert len(got.sequences) == len(expected.sequences)
    for a, b in zip(got.sequences, expected.sequences, strict=True):
        assert (a.tokens.tolist(), a.clipped.tolist()) == (b.tokens.tolist(), b.clipped.tolist())
        np.testing.assert_allclose(a.pull, b.pull, rtol=1e-4, atol=LIMIT)


def check_weights(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.abs(got[name] - weight).max() < LIMIT, name


@pytest.mark.parametrize("team", [{"tensor_model_parallel_size": 2}, {}], ids=["tp2", "dp2"], indirect=True)
def test_two_ranks_take_the_step_that_one_takes(
    request: pytest.FixtureRequest, team: Team, alone: Told, model: Path, tmp_path: Path
) -> None:
    """Loss, figures, gradients by way of the weights, and logprobs; then one rank dies in the middle of a step."""
    told = tell(team, tmp_path)
    for got, expected in zip(told.reports, alone.reports, strict=True):
        check_step(got, expected)
    for mine, theirs in zip(told.weights, alone.weights, strict=True):
        check_weights(mine, theirs)
    moved = max(np.abs(a - b).max() for a, b in zip(alone.weights[0].values(), alone.weights[1].values(), strict=True))
    assert moved > 100 * LIMIT, "a step that is left out would be seen"
    for a, b in zip(told.logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=LIMIT * 10, rtol=0)
    if team.settings.tensor_model_parallel_size == 1:
        one_rank_dies(team)
        goes_on_from_its_checkpoint(model, tmp_path, alone)


def one_rank_dies(team: Team) -> None:
    """It is stopped, so that the other waits for it in a collective; then it is killed −9."""
    ranks: Any = team._ranks
    victim, other = ranks._processes[1], ranks._processes[0]
    os.kill(victim.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(team.step, micro_batches(2), LOSS)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(TrainerFailed, match="trainer rank 1 has died"):
            step.result(300)
    other.join(60)
    assert not other.is_alive(), "nobody is left waiting in the collective"
    with pytest.raises(TrainerFailed, match="rank"):
        team.step(micro_batches(2), LOSS)


def goes_on_from_its_checkpoint(model: Path, folder: Path, alone: Told) -> None:
    """A new team takes the second step again."""
    trainer = make_trainer(settings(model, world_size=2))
    try:
        trainer.load(folder / "saved")
        check_step(trainer.step(micro_batches(COUNTS[1]), LOSS), alone.reports[1])
        check_weights(weights(trainer, folder / "again"), alone.weights[1])
    finally:
        trainer.close()
