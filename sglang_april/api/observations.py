"""Observations of one rank outside of a step; rank 0 broadcasts them to all ranks (`rank-determinism`)."""

from typing import Literal

import msgspec


class Moved(msgspec.Struct, tag=True):
    """Copies of KV pages, by number: those that all ranks completed, and those that failed on some rank."""

    done: list[int]
    failed: dict[int, str] = {}
    """Number → reason."""


class Tuned(msgspec.Struct, tag=True):
    """The value of `concurrency: auto` from the next step on, and the measurements behind it."""

    concurrency: int
    step_ms: list[tuple[float, float]]
    """(samples in the batch, milliseconds of a decode step), the largest batch first."""


class Rates(msgspec.Struct, tag=True, frozen=True):
    """The costs by which `kv: auto` decides, in seconds of the slowest rank, measured at start (`kv/cost_model.py`)."""

    token_s: float
    """Prefill of one token in full chunks."""
    square_s: float
    """Additional prefill time, times the squared length of a sample."""
    copy_s: dict[Literal["host", "disk"], tuple[float, float]]
    """Per token of KV: (copy off the device, copy back), for each existing tier."""
