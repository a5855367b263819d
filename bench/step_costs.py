"""Step costs of an engine, measured by a client, for bench/simulate.py.

`bench.rollout` probes them between the rounds that it measures, because the speed of a shared machine changes within
minutes. Every row of its main table has the costs measured during it.
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
"""Batch sizes of the decode probe; each probe measures the full batch and one of these."""
ARRIVALS = ((1, 16, 6), (16, 16, 2), (1, 256, 4))
"""(prompts, tokens of each, repetitions) of the prefills that interrupt a decoding batch."""
SETTLE_STEPS = 12
STEPS = 900
"""Output length of the background batch, longer than any probe."""


class Stall(NamedTuple):
    """Seconds for which a prefill of `samples` prompts with `tokens` tokens in total delayed the decoding batch,
    including the engine's per-request work."""

    samples: int
    tokens: int
    seconds: float


@dataclass
class Observed:
    """Results of the probes of an engine, in seconds."""

    decodes: list[DecodeRate] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    pushes: list[float] = field(default_factory=list)
    prefills: list[tuple[int, int, float]] = field(default_factory=list)
    """(prompts, their tokens, seconds until a client has one output token of each)."""
    aborts: list[float] = field(default_factory=list)

    def add(self, other: "Observed") -> None:
        """Append the results of another probe."""
        for name, values in vars(other).items():
            getattr(self, name).extend(values)

    def step_ms(self) -> dict[str, float]:
        """Mean milliseconds of a decode step by batch size."""
        by_rows: dict[int, list[float]] = {}
        for point in self.decodes:
            by_rows.setdefault(point.rows, []).append(1e3 * point.seconds)
        return {str(rows): round(sum(by_rows[rows]) / len(by_rows[rows]), 3) for rows in sorted(by_rows)}

    def costs(self) -> Costs:
        """Non-negative least-squares fit. `join_s` is assumed to equal the cost of a decode row."""
        step_s, row_s, kv_token_s = fitted([(1, rows, tokens, took) for rows, tokens, took in self.decodes])
        prefill_s, sample_s, token_s = fitted([(1, samples, tokens, took) for samples, tokens, took in self.stalls])
        gaps = [
            max(0.0, took - prefill_s - count * sample_s - tokens * token_s) for count, tokens, took in self.prefills
        ]
        push_s, gap_s, abort_s = (median(values) if values else 0.0 for values in (self.pushes, gaps, self.aborts))
        return Costs(
            step_s=step_s, row_s=row_s, kv_token_s=kv_token_s,
            prefill_s=prefill_s, prefill_sample_s=sample_s, prefill_token_s=token_s,
            push_s=push_s, gap_s=gap_s, abort_s=gap_s + abort_s, join_s=row_s,
        )  # fmt: skip


def fitted(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Coefficients of a non-negative least-squares fit of the last column by the others."""
    table = np.array(rows, dtype=float)
    scale = np.abs(table[:, :-1]).max(axis=0)
    found, _ = nnls(table[:, :-1] / scale, table[:, -1])
    return tuple(float(value) for value in found / scale)


async def probe(
    engine: EngineClient, checkpoint: Path | None, slots: int, length: int, prompt_tokens: int, batch: int
) -> Observed:
    """Probe an idle engine for a few seconds; `checkpoint` is pushed without a flush."""
    seen = Observed()
    seen.decodes += (await decode_rate(engine, batch, length, prompt_tokens)).halves
    seen.stalls = await _stalls(engine, max(1, slots // 2))
    seen.prefills.append((slots, slots * prompt_tokens, await _timed(lambda: _prefill(engine, slots, prompt_tokens))))
    if checkpoint is not None:
        seen.pushes.append(await _timed(lambda: engine.load_weights(checkpoint, flush=False)))
    seen.aborts.append(await _abort(engine, slots))
    return seen


async def _stalls(engine: EngineClient, batch: int) -> list[Stall]:
    """Prefills during a decoding batch: the seconds that its decode steps do not account for."""
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
    """A decoding batch in the background, aborted at exit. Yields `after(steps)`, which waits for that many more of its
    steps and returns the counters after them."""
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
    """One output token for each of `count` random prompts that no cache holds."""
    ids = [[random.randrange(FIRST_TOKEN, VOCAB) for _ in range(tokens)] for _ in range(count)]
    await engine.post("/generate", {"input_ids": ids, "sampling_params": params(1), **LOGPROBS})


async def prefill_seconds(engine: EngineClient, tokens: int) -> float:
    """Seconds from the request to the answer of a prefill of one prompt, the shortest of three."""
    return min([await _timed(lambda: _prefill(engine, 1, tokens)) for _ in range(3)])


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
