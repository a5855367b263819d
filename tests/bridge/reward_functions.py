"""Reward functions for tests, correct and faulty ones. Imported by reward processes."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

from trainer_bridge.rewards import RewardSample, TrainingPrompt


def length(sample: RewardSample, prompt: TrainingPrompt) -> float:
    return float(len(sample.output_ids))


def even_ids(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """Differs between the samples of nearly every group."""
    return sum(token % 2 == 0 for token in sample.output_ids) / max(1, len(sample.output_ids))


def constant_for_some(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """Two groups of five have equal rewards, so DAPO rejects them."""
    return 1.0 if int(prompt.label) % 5 < 2 else even_ids(sample, prompt)


def odd_index_fails(sample: RewardSample, prompt: TrainingPrompt) -> float:
    if sample.index % 2:
        raise ValueError("no opinion")
    return 1.0


def fails_for_some(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """One group of three has no rewards."""
    if int(prompt.label) % 3 == 0:
        raise ValueError("unreadable")
    return even_ids(sample, prompt)


def hangs(sample: RewardSample, prompt: TrainingPrompt) -> float:
    if sample.index == 1:
        time.sleep(3600)
    return 1.0


def dies(sample: RewardSample, prompt: TrainingPrompt) -> float:
    if sample.index == 0:
        os._exit(3)
    return 2.0


def second_try(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """Fails in the first call; `metadata` is the path of a file that records it."""
    called = Path(prompt.metadata)
    if not called.exists():
        called.touch()
        raise RuntimeError("not yet")
    return 3.0


def not_a_number(sample: RewardSample, prompt: TrainingPrompt) -> Any:
    return {0: "many", 1: float("nan"), 2: None, 3: "0.5"}[sample.index]


def beyond_a_float(sample: RewardSample, prompt: TrainingPrompt) -> Any:
    return 10**400 if sample.index == 1 else 1.0


class Local(float):
    """A number whose class the trainer process cannot import."""


def of_a_local_class(sample: RewardSample, prompt: TrainingPrompt) -> Any:
    return Local(1.0) if sample.index == 1 else 1.0


def ranks(samples: list[RewardSample], prompt: TrainingPrompt) -> list[float]:
    return [float(place) for place, _ in enumerate(samples)]


def too_few(samples: list[RewardSample], prompt: TrainingPrompt) -> list[float]:
    return [1.0]


def _sleeps(pid_file: str) -> None:
    Path(pid_file).write_text(str(os.getpid()))
    time.sleep(3600)


def uses_processes(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """The first sample uses a pool of processes; the others start one, and hang, die, or return without it."""
    if sample.index == 0:
        with multiprocessing.Pool(2) as pool:
            return float(sum(pool.map(abs, [-1, -2, -3])))
    pid_file = Path(prompt.metadata) / str(sample.index)
    pid_file.unlink(missing_ok=True)  # of an earlier attempt
    multiprocessing.Process(target=_sleeps, args=(str(pid_file),)).start()
    while not pid_file.exists() or not pid_file.read_text():
        time.sleep(0.01)
    if prompt.label == "hangs":
        time.sleep(3600)
    elif prompt.label == "dies":
        os._exit(3)
    return 7.0
