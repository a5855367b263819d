"""Training on the demo's servers: waiting for all, and with the batch quota; Megatron runs on the CPU.

Both runs start from the same weights, learn from the same prompts in the same order with the same seeds, and take the
same number of samples per step. What differs is `partial_rollout` and the pool of prompts in the engine. The runs take
turns, one step each, so that the machine's load has the same effect on both. Each has a server of its own, because a
server has the weights of one policy, and its versions, from which staleness is counted, are those of one run. The other
server is idle meanwhile: between its rounds all samples are suspended.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from examples import sorting_task
from examples.agent import calculator
from examples.april_demo.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from trainer_bridge.config import Config

Row = dict[str, Any]
TRAINED = ("synchronous", "april")
"""Variants that train, in this order."""
HELD_OUT_SEED = 10_000
"""Seed of the held-out problems, the same for every seed of the run."""
REWARD = {"reward": "examples.sorting_task:reward", "reward_workers": 1}
AGENT = {"agent": "examples.agent.calculator:agent", "agent_workers": 1, "label_key": None}
LOST_AFTER_S = 60.0
"""Seconds to wait for a lost server, which does not return: the demo started it, not the trainer."""


@dataclass(frozen=True)
class Trained:
    """A training run read from its folder: a row per step, and one per evaluation."""

    steps: Sequence[Row]
    evaluations: Sequence[Row]

    @property
    def gain(self) -> float:
        """Held-out reward of the last evaluation minus that of the first."""
        return float(self.evaluations[-1]["reward"] - self.evaluations[0]["reward"])

    @property
    def learned(self) -> bool:
        """Whether the gain is above two standard errors of the held-out set."""
        return self.gain > 2 * standard_error(self.evaluations)


def standard_error(evaluations: Sequence[Row]) -> float:
    """Standard error of the held-out mean, over prompts: the larger of the first and the last evaluation."""
    return float(max(evaluations[0]["reward_se"], evaluations[-1]["reward_se"]))


def prepare(settings: Settings, out: Path) -> dict[str, Path]:
    """Write the training and the held-out prompts; remove the runs of an earlier demo."""
    folder, sizes = out / "training", settings.training
    shutil.rmtree(folder, ignore_errors=True)
    needed = sizes.steps * sizes.groups + sizes.pool
    wanted = {
        "prompt_data": (folder / "prompts.jsonl", settings.seed, needed),
        "eval_prompt_data": (folder / "held_out.jsonl", HELD_OUT_SEED, sizes.held_out),
    }
    return {name: _write(settings, *of) for name, of in wanted.items()}


def _write(settings: Settings, path: Path, seed: int, count: int) -> Path:
    if settings.agent:
        return calculator.write_prompts(path, itertools.islice(calculator.problems(seed), count))
    return sorting_task.write_prompts(path, itertools.islice(sorting_task.problems(seed, settings.lengths), count))


def configuration(
    variant: str, url: str, settings: Settings, data: Mapping[str, Path], out: Path, *, on_gpu: bool
) -> Config:
    """The trainer bridge's configuration of one of the two runs."""
    from trainer_bridge.args import load

    sizes, partial = settings.training, variant == "april"
    fields = {
        **{name: str(path) for name, path in data.items()},
        "hf_checkpoint": str(sizes.checkpoint),
        "server": url,
        "server_start_timeout": LOST_AFTER_S,
        "run": f"demo-{variant}",
        "save": str(out / "training" / variant),
        "seed": settings.seed,
        "num_rollout": sizes.steps,
        "save_interval": sizes.steps,
        "on_end": "drop",
        "partial_rollout": partial,
        "rollout_batch_size": sizes.groups,
        "over_sampling_batch_size": sizes.pool if partial else sizes.groups,
        "n_samples_per_prompt": sizes.samples_per_group,
        "max_staleness": settings.max_staleness,
        "rollout_max_response_len": settings.max_new_tokens,
        "rollout_temperature": settings.temperature,
        "rollout_seed": settings.seed,
        **(AGENT if settings.agent else REWARD),
        "lr": sizes.lr,
        "adam_beta2": 0.95,
        "train_dtype": "float32",
        "trainer_device": "cpu",
        "push": "disk" if on_gpu else "tensor",
        "eval_interval": sizes.eval_interval,
        "eval_temperature": settings.temperature,
    }
    return load(None, fields)


def train_in_turns(configs: Mapping[str, Config], console: Console) -> dict[str, Trained]:
    """Train runs from their first step to their last, one step of each in turn; prints a line per step."""
    import torch

    from trainer_bridge.loop import TrainingLoop
    from trainer_bridge.progress import RunProgress, read_rows

    # More threads do not speed up a tiny model, and one thread adds in a fixed order.
    torch.set_num_threads(1)
    width = max(map(len, configs))
    with contextlib.ExitStack() as stack:
        steps = []
        for name, config in configs.items():
            label = f"{name:<{width}}  " if len(configs) > 1 else ""
            loop = TrainingLoop(config, progress=RunProgress(Path(config.save), console, label))
            stack.callback(loop.close)
            steps.append(loop.steps())
        for _ in itertools.zip_longest(*steps):
            pass
    folders = {name: Path(config.save) for name, config in configs.items()}
    return {
        name: Trained(read_rows(folder / "steps.jsonl"), read_rows(folder / "evaluations.jsonl"))
        for name, folder in folders.items()
    }


def import_trainer() -> None:
    """Import the trainer, which takes as long as the server's start: call this while the server starts."""
    from trainer_bridge.megatron.device import hide_gpus

    hide_gpus()  # the engine's; the trainer runs on the CPU
    import trainer_bridge.loop
    import trainer_bridge.megatron.policy  # noqa: F401


def training_metrics(trained: Trained | None, other_load: float = 0.0) -> Row:
    """What training adds to a variant's row; None for a variant that did not train.

    Args:
        other_load: share of the cores that other processes used during the run.
    """
    names = ("reward_before", "reward_after", "reward_se", "seconds", "training")
    if trained is None:
        return dict.fromkeys(names)
    steps, evaluations = trained.steps, trained.evaluations
    first, last = evaluations[0], evaluations[-1]
    tokens, generated_s = (sum(row[name] for row in steps) for name in ("delivered_tokens", "generate_s"))
    return {
        "reward_before": round(first["reward"], 4),
        "reward_after": round(last["reward"], 4),
        "reward_se": round(standard_error(evaluations), 4),
        "seconds": round(last["seconds_so_far"], 1),
        "training": {
            "steps": len(steps),
            "samples": last["samples_so_far"],
            "held_out": first["prompts"],
            "other_load": round(other_load, 3),
            "gain": round(trained.gain, 4),
            "learned": trained.learned,
            "seconds_per_step": round(last["seconds_so_far"] / len(steps), 3),
            "delivered_tokens": tokens,
            "delivered_tokens_per_s": round(tokens / generated_s, 1),
            "off_policy_share": round(_share(steps, "off_policy_share"), 4),
            "length_max": max(max(row["lengths"]) for row in steps),
            **_turns(steps),
            "length_mean": round(mean(length for row in steps for length in row["lengths"]), 1),
            "seconds_by_part": {name: round(seconds, 1) for name, seconds in _parts(steps).items()},
            "evaluations": [
                {name: row[name] for name in ("step", "samples_so_far", "seconds_so_far", "reward", "reward_se")}
                for row in evaluations
            ],
        },
    }


def _turns(steps: Sequence[Row]) -> Row:
    """Turns of an agent's trajectories; empty for other samples."""
    turns = [count for row in steps for count in row.get("turns", ())]
    return {"turns_mean": round(mean(turns), 2), "turns_max": max(turns)} if turns else {}


def _share(steps: Sequence[Row], name: str) -> float:
    """A share of the tokens, over all steps."""
    tokens = sum(row["delivered_tokens"] for row in steps)
    return sum(row[name] * row["delivered_tokens"] for row in steps) / tokens


def _parts(steps: Sequence[Row]) -> dict[str, float]:
    """Seconds of all steps, by phase."""
    names = dict.fromkeys(name for row in steps for name in row["seconds"])
    return {name: sum(row["seconds"].get(name, 0.0) for row in steps) for name in names}
