"""A training run on a test's server: prompts, configuration, and what its samples were."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from trainer_bridge.args import load
from trainer_bridge.checkpoints import LoopState
from trainer_bridge.config import Config
from trainer_bridge.loop import TrainingLoop
from trainer_bridge.progress import read_rows
from trainer_bridge.samples import TrainingSample
from trainer_bridge.trainer import StepReport

REWARDS = Path(__file__).resolve().parents[1] / "bridge" / "reward_functions.py"

Token = tuple[str, int, int, float, int]
"""Prompt id, sample, token id, logprob, age."""


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    """Random prompts; the label is the row's number."""
    draw = random.Random(seed)
    rows = [{"input": [draw.randrange(6, 512) for _ in range(draw.randrange(2, 9))], "label": i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configuration(folder: Path, url: str, model: Path, **fields: Any) -> Config:
    """A small run in float32, pushed in the call: rounds of 4 × 4 samples, on 12 slots.

    Thirty of 512 tokens end a sample, so that lengths are geometric with a mean of 17, and there are partials.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base = {
        "hf_checkpoint": str(model),
        "prompt_data": str(write_prompts(folder / "prompts.jsonl", 64)),
        "reward": f"{REWARDS}:even_ids",
        "reward_workers": 1,
        "reward_timeout": 240.0,
        "save": str(folder / "run"),
        "server": url,
        "num_rollout": 1,
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 8,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 64,
        "rollout_stop_token_ids": list(range(6, 36)),
        "rollout_concurrency": 12,
        "lr": 1e-3,
        "train_dtype": "float32",
        "trainer_device": "cpu",
        "push": "tensor",
    }
    return load(None, {**base, **fields})


class Recorded(TrainingLoop):
    """A loop that remembers what it trained on, and what each step said."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.trained: list[list[TrainingSample]] = []
        self.reports: list[StepReport] = []

    def _train(self, made: list[TrainingSample], version: int) -> Any:
        self.trained.append(made)
        done = super()._train(made, version)
        self.reports += done[0]
        return done


L = TypeVar("L", bound=Recorded)


@contextmanager
def training(config: Config, kind: type[L] = Recorded) -> Iterator[L]:  # type: ignore[assignment]
    """A loop, closed at the end."""
    loop = kind(config)
    try:
        yield loop
    finally:
        loop.close()


def train(config: Config) -> tuple[LoopState, Recorded, list[dict[str, Any]]]:
    """A whole run, and the rows that it wrote."""
    with training(config) as loop:
        state = loop.run()
        return state, loop, read_rows(Path(config.save) / "steps.jsonl")


def keys(made: list[TrainingSample]) -> list[tuple[str, int]]:
    """Which samples."""
    return [(response.prompt_id, response.index) for response in made]
