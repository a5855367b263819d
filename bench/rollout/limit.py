"""The engine's own full-batch decode rate, measured in the same run: the limit, 1.0, for every variant."""

import asyncio
from collections.abc import Sequence

from bench.rollout.engine import Counters, Engine
from bench.rollout.workload import FIRST_TOKEN, VOCAB

POLL_S = 0.02


async def decode_rate(engine: Engine, batch: int, length: int, prompt_tokens: int) -> tuple[float, float]:
    """Tokens/s and seconds a step with exactly `batch` samples decoding, each from empty to `length` tokens.

    Take the length-biased mean of the workload as `length`: then the mean context is that of a full batch of it.
    """
    prompts = [
        [FIRST_TOKEN + (17 * row + column) % (VOCAB - FIRST_TOKEN) for column in range(prompt_tokens)]
        for row in range(batch)
    ]
    params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": length}
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True, "logprob_start_len": -1}
    task = asyncio.ensure_future(engine.post("/generate", body))
    seen: list[Counters] = []
    while not task.done():
        seen.append(await engine.counters())
        await asyncio.wait([task], timeout=POLL_S)
    await task
    return of_snapshots(seen, batch)


def of_snapshots(seen: Sequence[Counters], batch: int) -> tuple[float, float]:
    """Tokens/s and seconds a step between the first and the last look at a full batch with nothing waiting."""
    full = [look for look in seen if look.running == batch and not look.waiting]
    if len(full) < 2 or full[-1].steps <= full[0].steps:
        raise RuntimeError(f"the batch of {batch} was never seen full twice: give it more tokens")
    seconds = full[-1].time - full[0].time
    return (full[-1].decoded - full[0].decoded) / seconds, seconds / (full[-1].steps - full[0].steps)
