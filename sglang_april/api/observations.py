"""What only some rank can see, outside of a step. Rank 0 broadcasts it, and it takes effect on all ranks alike."""

from typing import Literal

import msgspec


class Moved(msgspec.Struct, tag=True):
    """Copies of KV pages that all ranks have completed, by number, and those that some rank could not, and why."""

    done: list[int]
    failed: dict[int, str] = {}


class Tuned(msgspec.Struct, tag=True):
    """What `concurrency: auto` stands for from the next step on, and what was measured."""

    concurrency: int
    step_ms: list[tuple[float, float]]
    """(samples in the batch, milliseconds of a decode step), the largest batch first."""


class Rates(msgspec.Struct, tag=True, frozen=True):
    """What `kv: auto` decides by, in seconds of the slowest rank, measured at start (`kv/cost_model.py`)."""

    token_s: float
    """To prefill one token in full chunks."""
    square_s: float
    """More, times the squared length of a sample."""
    copy_s: dict[Literal["host", "disk"], tuple[float, float]]
    """Per token of KV, (off the device, back to it), for each tier that there is."""
