"""The demo's rounds: three variants of `bench.rollout` take turns on one server, on the benchmark's workload.

The clock of a round runs from the start of its push to the reply. The engine's counters are read between rounds, off
the clock. Metrics cover the measured rounds, after the warm-up rounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from bench.rollout.april import AprilKeep
from bench.rollout.baselines import Outside, Synchronous
from bench.rollout.engine_client import Counters, EngineClient
from bench.rollout.lengths import named
from bench.rollout.metrics import Measured, between
from bench.rollout.variant import Plan, Variant, lost
from bench.rollout.workload import Stream
from examples.april_demo.settings import Settings

VARIANTS: dict[str, type[Variant]] = {"synchronous": Synchronous, "outside": Outside, "april": AprilKeep}
POLL_S = 0.02
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class TimedRound:
    """A measured round and its wall-clock times, in seconds."""

    start: float
    end: float
    measured: Measured


@dataclass
class Result:
    """The measurements of one variant."""

    name: str
    rounds: list[TimedRound] = field(default_factory=list)
    snapshots: list[Counters] = field(default_factory=list)
    samples_lost: int = 0
    samples_twice: int = 0

    @property
    def seconds(self) -> float:
        """Time of the measured rounds."""
        return sum(done.end - done.start for done in self.rounds)

    @property
    def tokens(self) -> int:
        """Delivered tokens."""
        return sum(done.measured.round.tokens for done in self.rounds)


Progress = Callable[[int, Result], None]
"""Called after every round with the rounds that the variant has done, warm-up included."""


def make_variants(engine: EngineClient, settings: Settings) -> dict[str, Variant]:
    """The variants by name, each with its own stream of the same prompts and lengths."""
    plan = Plan(
        slots=settings.slots,
        groups=settings.groups,
        n=settings.samples_per_group,
        over_sampling=settings.over_provision,
        max_staleness=settings.max_staleness,
    )
    lengths = named("lognormal", settings.mean_tokens, settings.longest_tokens)
    streams = {name: Stream(settings.seed, lengths, plan.n, PROMPT_TOKENS) for name in settings.variants}
    return {name: VARIANTS[name](engine, plan, stream) for name, stream in streams.items()}


async def run_interleaved(
    variants: dict[str, Variant], engine: EngineClient, settings: Settings, progress: Progress
) -> list[Result]:
    """Run every variant's rounds, in turn and in a changing order, then drain each to check that no sample was lost."""
    results = {name: Result(name) for name in variants}
    checkpoints = itertools.cycle(settings.checkpoints)
    names = list(variants)
    async with polled(engine) as snapshots:
        for number in range(settings.warmup_rounds + settings.rounds):
            checkpoint = next(checkpoints)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                before = await engine.settled()
                start = time.time()
                await variants[name].push(checkpoint)
                done = await variants[name].round()
                end = time.time()
                measured = between(before, await engine.settled(), done, end - start)
                if number >= settings.warmup_rounds:
                    results[name].rounds.append(TimedRound(start, end, measured))
                progress(number + 1, results[name])
        for name, variant in variants.items():
            await variant.drain()
            results[name].snapshots = snapshots
            results[name].samples_lost, results[name].samples_twice = lost(variant, settings.samples_per_group)
    return list(results.values())


@contextlib.asynccontextmanager
async def polled(engine: EngineClient) -> AsyncIterator[list[Counters]]:
    """Poll the scheduler's counters in the background; yields the list they are appended to."""
    snapshots: list[Counters] = []

    async def poll() -> None:
        while True:
            snapshots.append(await engine.counters())
            await asyncio.sleep(POLL_S)

    task = asyncio.create_task(poll())
    try:
        yield snapshots
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def metrics(result: Result, settings: Settings) -> dict[str, Any]:
    """The row of a variant in the table and in summary.json."""
    rounds = [done.measured for done in result.rounds]
    groups = [group for measured in rounds for group in measured.round.groups]
    return {
        "variant": result.name,
        "delivered_tokens_per_s": round(result.tokens / result.seconds, 1),
        "tokens_after_end": sum(measured.after_end or 0 for measured in rounds),
        "reprefilled_tokens": sum(measured.round.reprefilled or 0 for measured in rounds),
        "samples_lost": result.samples_lost,
        "off_policy_share": round(sum(group.off_policy or 0 for group in groups) / result.tokens, 4),
        "samples_delivered_twice": result.samples_twice,
        "rollout_seconds": round(result.seconds, 3),
        "delivered_tokens": result.tokens,
        "delivered_samples": sum(len(group.lengths) for group in groups),
        "decoded_tokens": sum(measured.decoded for measured in rounds),
        "decode_steps": sum(measured.steps for measured in rounds),
        "prefilled_tokens": sum(measured.prefilled for measured in rounds),
        "mean_running": round(mean_running(result), 2),
        "slots": settings.slots,
        "round_seconds": [round(measured.seconds, 3) for measured in rounds],
    }


def timeline(result: Result) -> tuple[list[float], list[int], list[float]]:
    """The running batch over rollout time, without the gaps between rounds.

    Returns:
        Times in seconds, samples running from each time on, and the ends of the rounds.
    """
    times, running, ends = [0.0], [0], []
    clock = 0.0
    for done in result.rounds:
        for snapshot in result.snapshots:
            if done.start <= snapshot.time <= done.end:
                times.append(clock + snapshot.time - done.start)
                running.append(snapshot.running)
        clock += done.end - done.start
        times.append(clock)
        running.append(0)
        ends.append(clock)
    return times, running, ends


def mean_running(result: Result) -> float:
    """Mean of the running batch over rollout time."""
    times, running, ends = timeline(result)
    area = sum(count * (later - now) for count, now, later in zip(running, times, times[1:], strict=False))
    return area / ends[-1]
