"""Trainer and engine compute equal logprobs for the same tokens, also after pushes of trained weights."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bridge.reference import micro_batches
from tests.integration.conftest import NORMAL, OVERLAP, Pool
from tests.support.live import LiveServer, live_server
from trainer_bridge.batch import Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.megatron.worker_group import make_trainer
from trainer_bridge.trainer import Trainer, TrainerSettings

LIMIT = 1e-4
"""Largest difference of a logprob, float32."""
SERVERS = {
    "qwen3": ("normal", NORMAL),
    "llama": ("overlap", OVERLAP),
    "qwen2": ("qwen2", NORMAL),
    "glm4": ("glm4", NORMAL),
}
PARAMS: dict[str, dict[str, Any]] = {
    "warm": {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 40},
    "cool": {"temperature": 0.8, "ignore_eos": True, "max_new_tokens": 40},
}
Groups = list[dict[str, Any]]


@pytest.fixture(params=SERVERS)
def live(request: pytest.FixtureRequest, pool: Pool, models: Callable[[str, int], Path]) -> Iterator[LiveServer]:
    name, flags = SERVERS[request.param]
    server = pool.get(name, flags, request.param, forked=name == request.param)
    with live_server(server, lambda seed: models(request.param, seed)) as live:
        yield live


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def trainer(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Trainer]:
    """A trainer whose weights differ from the engine's initial weights."""
    settings = TrainerSettings(
        hf_checkpoint=live.model(1),
        dtype="float32",
        tensor_model_parallel_size=request.param,
        world_size=request.param,
        lr=1e-3,
    )
    trainer = make_trainer(settings)
    trainer.connect([live.server.url])
    live.server.loaded = live.model(1)
    yield trainer
    trainer.close()


def fresh(live: LiveServer, run: str, name: str, **fields: Any) -> Groups:
    prompts = [
        {"id": f"{name} {key}", "input_ids": [20 + i, 21, 22], "n": 3, "sampling_params": params}
        for i, (key, params) in enumerate(PARAMS.items())
    ]
    return list(live.server.rollout(run=run, prompts=prompts, quota=None, **fields)["finished"])


def as_sequences(groups: Groups) -> Sequences:
    """Convert all samples of some groups to training sequences."""
    samples = [(group, sample) for group in groups for sample in group["samples"]]
    ids = [group["prompt_ids"] + sample["output_ids"] for group, sample in samples]
    return Sequences(
        ids=torch.tensor([token for each in ids for token in each]),
        lengths=torch.tensor([len(each) for each in ids]),
        responses=torch.tensor([len(sample["output_ids"]) for _, sample in samples]),
        temperature=torch.tensor([PARAMS[group["id"].split()[1]]["temperature"] for group, _ in samples]),
    )


def largest_difference(trainer: Trainer, groups: Groups, field: str = "logprobs") -> float:
    reported: Sequence[float] = [x for group in groups for sample in group["samples"] for x in sample[field]]
    logprobs = trainer.logprobs([as_sequences(groups)])[0].numpy()
    assert len(reported) == len(logprobs) > 100
    return float(np.abs(logprobs - np.array(reported)).max())


def train(trainer: Trainer) -> None:
    """Take one training step on arbitrary rewards, to change the policy."""
    report = trainer.step(micro_batches(2), LossSettings(algorithm="reinforce"))
    assert report.applied
    assert report.grad_norm > 0


def test_trainer_and_engine_logprobs_agree_before_and_after_training(
    live: LiveServer, trainer: Trainer, run: str
) -> None:
    """Push, train one step, push again; compare fresh samples at temperatures 1 and 0.8."""
    version = trainer.push().version
    before = fresh(live, run, "first")
    assert {span["version"] for g in before for s in g["samples"] for span in s["spans"]} == {version}
    differences = [largest_difference(trainer, before)]
    train(trainer)
    assert largest_difference(trainer, before) > LIMIT
    assert trainer.push().version == version + 1
    differences.append(largest_difference(trainer, fresh(live, run, "second")))
    print(f"\nlargest difference of a logprob ({live.server.name}): {differences}")
    assert max(differences) < LIMIT


@pytest.mark.parametrize("live", ["qwen3"], indirect=True)
@pytest.mark.parametrize("trainer", [1], indirect=True)
def test_proximal_logprobs_match_the_trainers_forward(live: LiveServer, trainer: Trainer, run: str) -> None:
    """A recompute returns the trainer's logprobs of tokens drawn under the previous version."""
    version = trainer.push().version
    short = {
        "id": "end now",
        "input_ids": [30, 31],
        "n": 1,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
    }
    prompts = [
        {"id": f"old {key}", "input_ids": [40 + i, 41, 42], "n": 2, "sampling_params": {**params, "max_new_tokens": 90}}
        for i, (key, params) in enumerate(PARAMS.items())
    ]
    live.server.rollout(run=run, prompts=[*prompts, short], quota=1)
    train(trainer)
    assert trainer.push().version == version + 1
    groups = live.server.drain(run, kv="recompute", proximal=True)
    assert len(groups) == 2
    for sample in (s for g in groups for s in g["samples"]):
        assert [span["version"] for span in sample["spans"]] == [version, version + 1]
        assert sample["proximal_version"] == version + 1
    assert largest_difference(trainer, groups, "proximal_logprobs") < LIMIT
    assert largest_difference(trainer, groups, "logprobs") > LIMIT
