"""Training runs on a test server: prompts, configuration, and a loop that records its samples."""

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


def write_prompts(path: Path, count: int, seed: int = 0) -> Path:
    """Random prompts; the label is the row number."""
    draw = random.Random(seed)
    rows = [{"input": [draw.randrange(6, 512) for _ in range(draw.randrange(2, 9))], "label": i} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def configuration(folder: Path, url: str, model: Path, **fields: Any) -> Config:
    """A small run in float32 with `push: tensor`: rounds of 4 × 4 samples, at most 12 at a time.

    30 of 512 tokens end a sample, so lengths are geometric with a mean of 17, and rounds leave partials.
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


class RecordingLoop(TrainingLoop):
    """A loop that records its training samples and step reports."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.trained: list[list[TrainingSample]] = []
        self.reports: list[StepReport] = []

    def _train(self, samples: list[TrainingSample], version: int) -> Any:
        self.trained.append(samples)
        steps = super()._train(samples, version)
        self.reports += [step.report for step in steps]
        return steps


L = TypeVar("L", bound=RecordingLoop)


@contextmanager
def training(config: Config, kind: type[L] = RecordingLoop) -> Iterator[L]:  # type: ignore[assignment]
    """A loop that is closed at the end."""
    loop = kind(config)
    try:
        yield loop
    finally:
        loop.close()


def train(config: Config) -> tuple[LoopState, RecordingLoop, list[dict[str, Any]]]:
    """Run a configuration to its end; returns the rows of steps.jsonl too."""
    with training(config) as loop:
        state = loop.run()
        return state, loop, read_rows(Path(config.save) / "steps.jsonl")


def sample_keys(samples: list[TrainingSample]) -> list[tuple[str, int]]:
    """Prompt id and index of each sample."""
    return [(sample.prompt_id, sample.index) for sample in samples]
