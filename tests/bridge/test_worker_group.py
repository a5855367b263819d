"""Teams of trainer processes: two ranks take the step that one takes, and the death of one is said and survived."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.tiny_model import make
from tests.bridge.reference import micro_batches
from tests.bridge.two_steps import COUNTS, LIMIT, LOSS, Told, check_step, check_weights, settings, tell, weights
from trainer_bridge.megatron.worker_group import WorkerGroup, make_trainer
from trainer_bridge.megatron.workers import TrainerFailed


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
def team(request: pytest.FixtureRequest, model: Path) -> Iterator[WorkerGroup]:
    made: Any = make_trainer(settings(model, world_size=2, **request.param))
    yield made
    made.close()


@pytest.mark.parametrize("team", [{"tensor_model_parallel_size": 2}, {}], ids=["tp2", "dp2"], indirect=True)
def test_two_ranks_take_the_step_that_one_takes(
    request: pytest.FixtureRequest, team: WorkerGroup, alone: Told, model: Path, tmp_path: Path
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


def one_rank_dies(team: WorkerGroup) -> None:
    """It is stopped, so that the other waits for it in a collective; then it is killed −9."""
    ranks: Any = team._ranks
    victim, other = ranks.processes[1], ranks.processes[0]
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
