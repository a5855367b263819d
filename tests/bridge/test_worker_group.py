"""Several trainer processes: two ranks train like one; the death of a rank is reported, and the run can be resumed."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.tiny_model import make
from tests.bridge.reference import micro_batches
from tests.bridge.two_steps import (
    COUNTS,
    LOSS,
    TOLERANCE,
    TwoSteps,
    check_step,
    check_weights,
    settings,
    train_two_steps,
    weights,
)
from trainer_bridge.megatron.convert import convert
from trainer_bridge.megatron.worker_group import WorkerGroup, make_trainer
from trainer_bridge.megatron.workers import TrainerFailed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make(tmp_path_factory.mktemp("model") / "qwen3", dtype="float32"))


@pytest.fixture(scope="module")
def one_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoSteps:
    """The steps of a single process."""
    trainer = make_trainer(settings(model))
    try:
        return train_two_steps(trainer, tmp_path_factory.mktemp("one_process"))
    finally:
        trainer.close()


@pytest.fixture
def group(request: pytest.FixtureRequest, model: Path) -> Iterator[WorkerGroup]:
    trainer: Any = make_trainer(settings(model, world_size=2, **request.param))
    yield trainer
    trainer.close()


@pytest.mark.parametrize("group", [{"tensor_model_parallel_size": 2}, {}], ids=["tp2", "dp2"], indirect=True)
def test_two_ranks_train_like_one(
    request: pytest.FixtureRequest, group: WorkerGroup, one_process: TwoSteps, model: Path, tmp_path: Path
) -> None:
    """Loss, statistics, weights (so gradients) and logprobs agree; then one rank is killed in the middle of a step."""
    recorded = train_two_steps(group, tmp_path)
    for got, expected in zip(recorded.reports, one_process.reports, strict=True):
        check_step(got, expected)
    for got_weights, expected_weights in zip(recorded.weights, one_process.weights, strict=True):
        check_weights(got_weights, expected_weights)
    moved = max(
        np.abs(a - b).max()
        for a, b in zip(one_process.weights[0].values(), one_process.weights[1].values(), strict=True)
    )
    assert moved > 100 * TOLERANCE, "the test would notice a skipped step"
    for a, b in zip(recorded.logprobs, one_process.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * 10, rtol=0)
    if group.settings.tensor_model_parallel_size == 1:
        kill_one_rank(group)
        resume_from_checkpoint(model, tmp_path, one_process)


def test_two_trainers_of_one_process_take_turns(model: Path, one_process: TwoSteps, tmp_path: Path) -> None:
    """Each has weights and an optimiser of its own, also after the other has been closed."""
    with ExitStack() as stack:
        other, trainer = (make_trainer(settings(model)) for _ in range(2))
        stack.callback(trainer.close)
        steps = []
        for count in COUNTS:
            other.step(micro_batches(count + 1), LOSS)
            steps.append(trainer.step(micro_batches(count), LOSS))
        other.close()
        check_weights(weights(trainer, tmp_path / "weights"), one_process.weights[1])
        for got, expected in zip(steps, one_process.reports, strict=True):
            check_step(got, expected)
        logprobs = [x.numpy() for x in trainer.logprobs([batch.sequences for batch in micro_batches(3)])]
    for a, b in zip(logprobs, one_process.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE * 10, rtol=0)


def test_data_parallel_ranks_share_the_optimiser_and_resume(model: Path, tmp_path: Path) -> None:
    """In bfloat16, offloaded between the steps: each rank saves float32 weights and states of its half, new processes
    that do not offload repeat a step, and the checkpoint can be converted."""
    given = replace(settings(model, world_size=2), dtype="bfloat16")

    def exported(trainer: Any, name: str) -> dict[str, torch.Tensor]:
        trainer.save(tmp_path / name / "trainer")
        convert(tmp_path / name / "trainer", model, tmp_path / name)
        return load_file(tmp_path / name / "model.safetensors")

    trainer = make_trainer(replace(given, offload=True))
    try:
        trainer.step(micro_batches(COUNTS[0]), LOSS)
        trainer.offload("optimizer")
        between = exported(trainer, "between")
        trainer.offload("weights")
        trainer.save(tmp_path / "saved")
        report = trainer.step(micro_batches(COUNTS[1]), LOSS)
        expected = exported(trainer, "expected")
    finally:
        trainer.close()
    parameters = sum(weight.numel() for weight in between.values())
    for rank in range(2):
        saved = torch.load(tmp_path / "saved" / f"rank-{rank}-of-2.pt", weights_only=False)["optimizer"]
        held = sum(weight.numel() for inner in saved for weight in inner["weights"])
        assert held == pytest.approx(parameters / 2, rel=0.02)
    convert(tmp_path / "saved", model, tmp_path / "converted")
    converted = load_file(tmp_path / "converted" / "model.safetensors")
    assert all(torch.equal(converted[name], weight) for name, weight in between.items())
    trainer = make_trainer(replace(given, offload=False))
    try:
        trainer.load(tmp_path / "saved")
        again = trainer.step(micro_batches(COUNTS[1]), LOSS)
        assert (again.loss, again.grad_norm) == (report.loss, report.grad_norm)
        got = exported(trainer, "got")
    finally:
        trainer.close()
    assert all(torch.equal(got[name], weight) for name, weight in expected.items())
    assert not all(torch.equal(between[name], weight) for name, weight in expected.items())


def kill_one_rank(group: WorkerGroup) -> None:
    """Stop it, so that the other rank waits for it in a collective, then kill it."""
    workers: Any = group.workers
    victim, other = workers.processes[1], workers.processes[0]
    os.kill(victim.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(group.step, micro_batches(2), LOSS)
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(TrainerFailed, match="trainer rank 1 has died"):
            step.result(300)
    other.join(60)
    assert not other.is_alive(), "the other rank is not left waiting in the collective"
    with pytest.raises(TrainerFailed, match="rank"):
        group.step(micro_batches(2), LOSS)


def resume_from_checkpoint(model: Path, folder: Path, one_process: TwoSteps) -> None:
    """New processes repeat the second step."""
    trainer = make_trainer(settings(model, world_size=2))
    try:
        trainer.load(folder / "saved")
        check_step(trainer.step(micro_batches(COUNTS[1]), LOSS), one_process.reports[1])
        check_weights(weights(trainer, folder / "again"), one_process.weights[1])
    finally:
        trainer.close()
