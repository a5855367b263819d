"""The demo's settings: one frozen value that every other module reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from examples.sorting_task import ListLengths

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "examples" / "checkpoints"


@dataclass(frozen=True)
class Training:
    """Sizes of the two training runs; the defaults fit two CPU cores and five minutes."""

    steps: int = 16
    """Rounds and optimiser steps of a run; 0: the demo does not train."""
    groups: int = 16
    """Groups per step: the quota."""
    samples_per_group: int = 8
    """`n`: samples per group."""
    pool: int = 48
    """Batch quota only: prompts in the engine at the start of a round."""
    held_out: int = 256
    """Problems that are never trained on, one answer each."""
    eval_interval: int = 4
    """Steps between evaluations."""
    lr: float = 3e-4
    checkpoint: Path = CHECKPOINTS / "warmup"
    """The checkpoint that training starts from (`examples/train_checkpoints.py`, `warm_up`)."""


AGENT_TRAINING = Training(
    steps=12, groups=8, pool=16, held_out=64, eval_interval=6, checkpoint=CHECKPOINTS / "calculator"
)
"""Of `--agent`: samples are trajectories of the calculator agent (`examples/agent`)."""
AGENT_TURN_TOKENS = 8
"""Bound of one turn of that agent: a call of the calculator has four tokens."""


@dataclass(frozen=True)
class Settings:
    """Sizes of the workload; the defaults fit two CPU cores and a few minutes."""

    slots: int = 32
    """Samples that the engine runs at once, the same for all variants."""
    groups: int = 16
    """Groups that a round delivers: the quota."""
    samples_per_group: int = 4
    """`n`: samples per group."""
    warmup_rounds: int = 3
    """Rounds before the clock starts, so that the carry has its steady size."""
    rounds: int = 6
    """Measured rounds."""
    over_provision: float = 1.5
    """The client-side baseline starts this many times the groups it needs; 1.5 was best in the benchmark."""
    mean_tokens: int = 64
    """Mean response length of the rounds, log-normal."""
    longest_tokens: int = 768
    """Longest response of the rounds."""
    max_staleness: int = 5
    """`april` only: pushes after which a group must finish."""
    seed: int = 0
    lengths: ListLengths = field(default_factory=ListLengths)
    """List lengths of the sorting task, for training."""
    temperature: float = 1.0
    variants: tuple[str, ...] = ("synchronous", "outside", "april")
    training: Training = field(default_factory=Training)
    agent: bool = False
    """Training on trajectories of an agent, and no other rounds."""

    @property
    def max_new_tokens(self) -> int:
        """A limit that only wrong answers reach: no list is longer, and correct answers end by themselves."""
        return AGENT_TURN_TOKENS if self.agent else self.lengths.longest + 32

    @property
    def model(self) -> Path:
        """The checkpoint that the server starts with."""
        return self.training.checkpoint if self.agent else self.checkpoints[0]

    @property
    def checkpoints(self) -> list[Path]:
        """The policy versions in order; after the last, the first follows again."""
        found = sorted(path for path in CHECKPOINTS.glob("v*") if (path / "config.json").exists())
        if len(found) < 2:
            raise FileNotFoundError(f"{CHECKPOINTS} contains no checkpoints: python -m examples.train_checkpoints")
        return found
