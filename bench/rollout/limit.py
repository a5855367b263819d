"""The engine's full-batch decode rate, measured in the same run: the upper limit of every variant."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.rollout.engine_client import Counters, EngineClient
from bench.rollout.workload import FIRST_TOKEN, VOCAB

POLL_S = 0.02
"""Longest interval between two reads of the counters; it starts at 5 ms, because a short batch ends within a few."""
TRIES = 4


class NeverFullError(RuntimeError):
    """The full batch never ran with all its samples at once."""


class DecodeRate(NamedTuple):
    """Mean seconds of a decode step with `rows` rows and `tokens` KV tokens in total."""

    rows: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True)
class Decoded:
    """A batch that decoded alone: tokens/s over all steps, and the two halves, whose contexts differ."""

    rate: float
    halves: tuple[DecodeRate, ...]


async def decode_rate(engine: EngineClient, batch: int, length: int, prompt_tokens: int) -> Decoded:
    """Decode exactly `batch` samples from 0 to `length` output tokens, repeated if the batch ended between two reads of
    the counters.

    With the length-biased mean of the workload as `length`, the mean context is that of a full batch of the workload.
    """
    for _ in range(TRIES - 1):
        with contextlib.suppress(NeverFullError):
            return await _decoded(engine, batch, length, prompt_tokens)
    return await _decoded(engine, batch, length, prompt_tokens)


async def _decoded(engine: EngineClient, batch: int, length: int, prompt_tokens: int) -> Decoded:
    body = {"input_ids": prompts(batch, prompt_tokens), "sampling_params": params(length), **LOGPROBS}
    task = asyncio.ensure_future(engine.post("/generate", body))
    seen: list[Counters] = []
    start = time.monotonic()
    while not task.done():
        seen.append(await engine.counters())
        await asyncio.wait([task], timeout=min(POLL_S, 0.005 + (time.monotonic() - start) / 10))
    await task
    return of_snapshots(seen, batch, prompt_tokens)


LOGPROBS = {"return_logprob": True, "logprob_start_len": -1}


def params(length: int) -> dict[str, object]:
    """Sampling parameters for a fixed length."""
    return {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": length}


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Random token ids from a fixed seed."""
    return [
        [FIRST_TOKEN + (17 * row + column) % (VOCAB - FIRST_TOKEN) for column in range(tokens)] for row in range(count)
    ]


def of_snapshots(seen: Sequence[Counters], batch: int, prompt_tokens: int = 0) -> Decoded:
    """The decode rate from counters read while the full batch ran and nothing waited."""
    full = [probe for probe in seen if probe.running == batch and not probe.waiting]
    full = [probe for number, probe in enumerate(full) if not number or probe.steps > full[number - 1].steps]
    if len(full) < 2:
        raise NeverFullError(f"the batch of {batch} was never seen full twice: give it more tokens, or a larger pool")
    begun = seen[0].decoded
    middle = full[len(full) // 2]
    pieces = [(one, two) for one, two in ((full[0], middle), (middle, full[-1])) if two.steps > one.steps]
    halves = tuple(
        DecodeRate(batch, batch * prompt_tokens + (one.decoded + two.decoded) / 2 - begun, _step(one, two))
        for one, two in pieces
    )
    seconds = full[-1].time - full[0].time
    return Decoded((full[-1].decoded - full[0].decoded) / seconds, halves)


def _step(one: Counters, two: Counters) -> float:
    return (two.time - one.time) / (two.steps - one.steps)
