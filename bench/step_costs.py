"""What an engine's steps cost, seen from outside, for bench/simulate.py.

`bench.rollout` takes these looks between the rounds that it measures, because a machine that others share is not as
fast in the next minute; every row of its main table has the costs that were found beside it.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from bench.rollout.engine_client import Counters, EngineClient
from bench.rollout.limit import LOGPROBS, DecodeRate, decode_rate, params, prompts
from bench.rollout.workload import FIRST_TOKEN, VOCAB
from bench.simulated_engine import Costs

BATCHES = (1, 8, 32)
"""Beside the full batch, one of these at each look."""
ARRIVALS = ((1, 16, 6), (16, 16, 2), (1, 256, 4))
"""Prompts at once, tokens of each, and how often: what joins a batch that decodes meanwhile."""
SETTLE_STEPS = 12
STEPS = 900
"""Of a batch in the background: more than it lives."""


class Stall(NamedTuple):
    """Seconds by which a prefill of so many samples with so many prompt tokens in all kept the others from decoding:
    its own time, and what the engine does for samples that come and go."""

    samples: int
    tokens: int
    seconds: float


@dataclass
class Observed:
    """What looks at an engine have found; seconds."""

    decodes: list[DecodeRate] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    pushes: list[float] = field(default_factory=list)
    gathers: list[tuple[int, int, float]] = field(default_factory=list)
    """Prompts, their tokens, and the time until a client has one token for each."""
    aborts: list[float] = field(default_factory=list)

    def add(self, other: "Observed") -> None:
        """All that another look has found."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of a decode step, by rows."""
        by_rows: dict[int, list[float]] = {}
        for point in self.decodes:
            by_rows.setdefault(point.rows, []).append(1e3 * point.seconds)
        return {str(rows): round(sum(by_rows[rows]) / len(by_rows[rows]), 3) for rows in sorted(by_rows)}

    def costs(self) -> Costs:
        """Least squares, none below zero. `join_s` is taken for a decode row's own cost."""
        step_s, row_s, kv_token_s = fitted([(1, rows, tokens, took) for rows, tokens, took in self.decodes])
        prefill_s, sample_s, token_s = fitted([(1, samples, tokens, took) for samples, tokens, took in self.stalls])
        gaps = [
            max(0.0, took - prefill_s - count * sample_s - tokens * token_s) for count, tokens, took in self.gathers
        ]
        push_s, gap_s, abort_s = (median(values) if values else 0.0 for values in (self.pushes, gaps, self.aborts))
        return Costs(
            step_s=step_s, row_s=row_s, kv_token_s=kv_token_s,
            prefill_s=prefill_s, prefill_sample_s=sample_s, prefill_token_s=token_s,
            push_s=push_s, gap_s=gap_s, abort_s=gap_s + abort_s, join_s=row_s,
        )  # fmt: skip


def fitted(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Least squares of the last column by the others, none below zero."""
    table = np.array(rows, dtype=float)
    scale = np.abs(table[:, :-1]).max(axis=0)
    found, _ = nnls(table[:, :-1] / scale, table[:, -1])
    return tuple(float(value) for value in found / scale)


async def look(
    engine: EngineClient, checkpoint: Path | None, slots: int, length: int, prompt_tokens: int, batch: int
) -> Observed:
    """One look of a few seconds at an idle engine; `checkpoint`: what is pushed, without a flush."""
    seen = Observed()
    seen.decodes += (await decode_rate(engine, batch, length, prompt_tokens)).halves
    seen.stalls = await _stalls(engine, max(1, slots // 2))
    seen.gathers.append((slots, slots * prompt_tokens, await _timed(lambda: _prefill(engine, slots, prompt_tokens))))
    if checkpoint is not None:
        seen.pushes.append(await _timed(lambda: engine.load_weights(checkpoint, flush=False)))
    seen.aborts.append(await _abort(engine, slots))
    return seen


async def _stalls(engine: EngineClient, batch: int) -> list[Stall]:
    """Prefills beside a batch that decodes: the seconds that its steps do not account for."""
    async with _decoding(engine, batch) as after:
        marks = [await after(0)]
        for count, tokens, times in ARRIVALS:
            marks.append(await after(SETTLE_STEPS))
            for _ in range(times):
                await _prefill(engine, count, tokens)
            marks.append(await after(2))
        marks.append(await after(SETTLE_STEPS))
    quiet = [(two.time - one.time, two.steps - one.steps) for one, two in zip(marks[::2], marks[1::2], strict=True)]
    step = sum(took for took, _ in quiet) / sum(steps for _, steps in quiet)
    return [
        Stall(count, count * tokens, (two.time - one.time - (two.steps - one.steps) * step) / times)
        for one, two, (count, tokens, times) in zip(marks[1::2], marks[2::2], ARRIVALS, strict=False)
    ]


@contextlib.asynccontextmanager
async def _decoding(engine: EngineClient, batch: int) -> AsyncIterator[Callable[[int], Awaitable[Counters]]]:
    """A batch that decodes meanwhile, and is aborted in the end. Yields a wait for so many more steps of it, which
    returns the counters after them."""
    body = {"input_ids": prompts(batch, 8), "sampling_params": params(STEPS), **LOGPROBS}
    task = asyncio.ensure_future(engine.post("/generate", body))

    async def after(steps: int) -> Counters:
        until = None
        while not task.done():
            seen = await engine.counters()
            if seen.running >= batch:
                until = seen.steps + steps if until is None else until
                if seen.steps >= until:
                    return seen
            await asyncio.sleep(0.002)
        raise RuntimeError(f"a batch of {batch} ended within {STEPS} steps")

    try:
        yield after
    finally:
        await engine.abort_all()
        await task


async def _prefill(engine: EngineClient, count: int, tokens: int) -> None:
    """One new token for each of so many prompts that no cache has seen."""
    ids = [[random.randrange(FIRST_TOKEN, VOCAB) for _ in range(tokens)] for _ in range(count)]
    await engine.post("/generate", {"input_ids": ids, "sampling_params": params(1), **LOGPROBS})


async def _abort(engine: EngineClient, batch: int) -> float:
    """Seconds from the abort of a full batch to its last answer."""
    async with _decoding(engine, batch) as after:
        await after(0)
        start = time.perf_counter()
    return time.perf_counter() - start


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start
