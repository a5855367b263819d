"""The step costs of a running server, from outside, for bench/simulate.py. A quiet machine, or they mean nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from bench.rollout.engine import Engine
from bench.rollout.limit import decode_rate
from bench.rollout.presets import Preset
from bench.rollout.workload import FIRST_TOKEN, VOCAB
from bench.round_model import Costs

REPEATS = 7
LENGTHS = (48, 192)
PROMPTS = (16, 256)


async def measured_costs(url: str, checkpoint: Path, preset: Preset) -> Costs:
    """Decode by least squares over batches and lengths, prefill by two prompt lengths, a push, and what a client needs
    to gather a full batch of answers and to abort one. `join_s` is taken for a decode row's own cost."""
    slots = preset.plan.slots
    async with Engine(url, patched=False) as engine:
        points = []
        for batch in (1, slots // 4, slots):
            for length in LENGTHS:
                _, step = await decode_rate(engine, batch, length, preset.prompt_tokens)
                points.append((batch, batch * (preset.prompt_tokens + length / 2), step))
        step_s, row_s, kv_token_s = decode_fit(points)
        ping = await _median(lambda: engine.get("/v1/loads?include=core"))
        short, long = [await _median(lambda tokens=tokens: _prefill(engine, 1, tokens)) for tokens in PROMPTS]
        token_s = max(0.0, (long - short) / (PROMPTS[1] - PROMPTS[0]))
        prefill_s = max(0.0, short - ping - PROMPTS[0] * token_s)
        gather = await _median(lambda: _prefill(engine, slots, preset.prompt_tokens))
        push_s = await _median(lambda: engine.load_weights(checkpoint, flush=True))
        gap_s = max(0.0, gather - prefill_s - slots * preset.prompt_tokens * token_s)
        abort_s = median([await _abort(engine, slots, preset.longest) for _ in range(REPEATS)])
    return Costs(step_s, row_s, kv_token_s, prefill_s, token_s, push_s, gap_s, gap_s + abort_s, row_s)


def decode_fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Least squares of seconds = step + rows × row + KV tokens × token over (rows, KV tokens, seconds), none < 0."""
    table = np.array(points)
    columns = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
    found, *_ = np.linalg.lstsq(columns, table[:, 2], rcond=None)
    if found[2] < 0:
        found[:2], *_ = np.linalg.lstsq(columns[:, :2], table[:, 2], rcond=None)
        found[2] = 0.0
    step, row, token = (max(0.0, float(value)) for value in found)
    return step, row, token


async def _prefill(engine: Engine, batch: int, tokens: int) -> None:
    """One new token for each of `batch` prompts that no cache has seen."""
    salt = time.monotonic_ns()
    prompts = [
        [FIRST_TOKEN + (salt // (at + 1) + 31 * row + at) % (VOCAB - FIRST_TOKEN) for at in range(tokens)]
        for row in range(batch)
    ]
    params = {"max_new_tokens": 1, "ignore_eos": True}
    await engine.post("/generate", {"input_ids": prompts, "sampling_params": params})


async def _abort(engine: Engine, batch: int, longest: int) -> float:
    """Seconds from the abort of a full batch to its last answer."""
    params = {"max_new_tokens": longest, "ignore_eos": True}
    body = {"input_ids": [[FIRST_TOKEN + row % 100] * 8 for row in range(batch)], "sampling_params": params}
    task = asyncio.ensure_future(engine.post("/generate", body))
    while (await engine.counters()).running < batch and not task.done():
        await asyncio.sleep(0.005)
    start = time.perf_counter()
    await engine.abort_all()
    await task
    return time.perf_counter() - start


async def _median(call: Callable[[], Awaitable[object]]) -> float:
    """Median seconds of a call."""
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        await call()
        took.append(time.perf_counter() - start)
    return median(took)
