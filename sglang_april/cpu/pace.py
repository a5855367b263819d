"""`--april-cpu-pace FILE`: forwards on the CPU platform end no earlier than a GPU's would.

The small model's forward runs inline, with real tokens and KV pages. A clock models the GPU: a forward begins when
it is launched or when the previous one ends, whichever is later, and takes the time of the table. Nothing is slept at
launch: the events that SGLang records on its streams carry the clock's reading, and waiting for one sleeps until then,
so host work overlaps with a step as it does on a GPU. Forwards are one stream, so they queue.

The small forward takes the place of a GPU's launch: its CPU time is part of the scheduler's host time, on the same
cores. A step whose host work and small forward together exceed the table's time is late, as it would be on a GPU whose
host is too slow. Copies of KV pages and the loading of weights take the time that they take on the CPU.
"""

import bisect
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_april import config

ENV = "SGLANG_APRIL_CPU_PACE"
"""The same setting for a server without the plugin; `--april-cpu-pace` has precedence."""
AXES = {"decode_ms": ("rows", "context"), "prefill_ms": ("tokens", "attended")}


@dataclass(frozen=True)
class Grid:
    """Milliseconds at the points of two ascending axes, bilinear in between.

    Beyond its last point an axis is continued in a straight line, before its first it is constant.
    """

    first: Sequence[float]
    second: Sequence[float]
    ms: Sequence[Sequence[float]]

    def at(self, x: float, y: float) -> float:
        """Milliseconds at a point."""
        i, u = _place(self.first, x)
        j, v = _place(self.second, y)
        low = self.ms[i][j] * (1 - v) + self.ms[i][j + 1] * v
        high = self.ms[i + 1][j] * (1 - v) + self.ms[i + 1][j + 1] * v
        return low * (1 - u) + high * u


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """Index of the interval used for a value, and the value's relative position in it (above 1 beyond the axis)."""
    i = min(max(bisect.bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return i, max(0.0, (value - axis[i]) / (axis[i + 1] - axis[i]))


@dataclass(frozen=True)
class Table:
    """Times of the forwards of one model on one machine."""

    name: str
    decode: Grid
    """Milliseconds of a decode step, by rows and mean context in tokens."""
    prefill: Grid
    """Milliseconds of a prefill, by new tokens of the batch and the mean context that they attend to, in tokens."""

    def seconds(self, batch: Any) -> float:
        """Modelled seconds of a forward batch (SGLang's `ForwardBatch`)."""
        if batch.forward_mode.is_idle() or not batch.batch_size:
            return 0.0
        rows = int(batch.batch_size)
        if batch.forward_mode.is_decode():
            return self.decode.at(rows, float(batch.seq_lens_cpu.sum()) / rows) / 1e3
        lengths, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
        tokens = sum(lengths)
        attended = sum(new * (before + new / 2) for new, before in zip(lengths, prefixes, strict=True))
        return self.prefill.at(tokens, attended / max(1, tokens)) / 1e3


def load(path: str) -> Table:
    """Read a table.

    Raises:
        ConfigError: the file is not a table; the message names it.
    """
    try:
        values = json.loads(Path(path).read_text())
        grids = {key: _grid(values[key], *axes) for key, axes in AXES.items()}
        return Table(str(values["name"]), grids["decode_ms"], grids["prefill_ms"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise config.ConfigError(f"--april-cpu-pace {path} is not a table of times: {error!r}") from None


def _grid(values: dict[str, Any], first: str, second: str) -> Grid:
    if missing := [axis for axis in (first, second) if axis not in values]:
        raise ValueError(f"no axis {missing[0]!r} (an older format?); bench/pace.py writes the table again")
    grid = Grid(values[first], values[second], values["ms"])
    for axis in (grid.first, grid.second):
        if len(axis) < 2 or list(axis) != sorted(set(axis)):
            raise ValueError("an axis needs two ascending values")
    times = [ms for row in grid.ms for ms in row]
    if len(grid.ms) != len(grid.first) or any(len(row) != len(grid.second) for row in grid.ms):
        raise ValueError("the times do not fit the axes")
    if not all(isinstance(ms, int | float) and 0 < ms < float("inf") for ms in times):
        raise ValueError("every time must be above 0")
    return grid


def chosen() -> Table | None:
    """The table of this server, or None: forwards then end when the CPU is done."""
    path = (config.load().cpu_pace if config.is_active() else None) or os.environ.get(ENV)
    return load(path) if path else None


class Clock:
    """When the device will be done with what was launched, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.done_at = 0.0

    def launch(self, seconds: float) -> None:
        """Queue a forward behind the earlier ones."""
        self.done_at = max(self.done_at, time.perf_counter()) + seconds

    @staticmethod
    def wait(until: float) -> None:
        """Sleep until a reading has passed."""
        while (left := until - time.perf_counter()) > 0:
            time.sleep(left)


def install(runner: Any, table: Table) -> None:
    """Pace the forwards of a model runner, the only one of its process."""
    from sglang_april.adapter.shapes.installed import shape

    clock, stock = Clock(), runner.forward
    overlaps = not shape.resolved(runner.server_args).disable_overlap_schedule

    def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
        clock.launch(table.seconds(batch))
        result = stock(batch, *args, **kwargs)
        if not overlaps:  # the normal loop reads the results without an event
            clock.wait(clock.done_at)
        return result

    runner.forward = forward
    torch.cpu.Event = event_of(clock)
    torch.cpu.synchronize = lambda device=None: clock.wait(clock.done_at)  # noqa: ARG005 - torch's signature


def event_of(clock: Clock) -> type[torch.cpu.Event]:
    """An event class of the clock's stream, with torch's interface."""

    class Event(torch.cpu.Event):
        reached_at = 0.0

        def record(self, stream: Any = None) -> None:  # noqa: ARG002 - torch's signature
            self.reached_at = clock.done_at

        def query(self) -> bool:
            return time.perf_counter() >= self.reached_at

        def synchronize(self) -> None:
            clock.wait(self.reached_at)

    return Event
