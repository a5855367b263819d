"""The demo's rounds: metrics, the timeline, and variants that take turns."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from bench.rollout.engine_client import Counters, EngineClient
from bench.rollout.metrics import Measured
from bench.rollout.variant import DeliveredGroup, RoundResult, Variant
from examples.april_demo.rounds import Result, TimedRound, mean_running, metrics, run_interleaved, timeline
from examples.april_demo.settings import Settings


def snapshot(time: float, running: int) -> Counters:
    return Counters(time, running, 0, 0, 0, 0)


def timed(start: float, end: float, done: RoundResult, **counts: Any) -> TimedRound:
    defaults = {"decoded": 0, "steps": 0, "prefilled": 0, "after_end": 0}
    return TimedRound(start, end, Measured(done, end - start, **{**defaults, **counts}))


def test_timeline_leaves_out_the_gaps_between_rounds() -> None:
    rounds = [timed(10.0, 12.0, RoundResult(0, [])), timed(20.0, 21.0, RoundResult(0, []))]
    seen = [snapshot(moment, running) for moment, running in ((9.0, 9), (10.5, 2), (11.5, 1), (15.0, 9), (20.0, 3))]
    result = Result("april", rounds, seen)
    times, running, ends = timeline(result)
    assert ends == [2.0, 3.0]
    assert list(zip(times, running, strict=True)) == [(0, 0), (0.5, 2), (1.5, 1), (2.0, 0), (2.0, 3), (3.0, 0)]
    assert mean_running(result) == pytest.approx((2 * 1.0 + 1 * 0.5 + 3 * 1.0) / 3)


def test_metrics_of_two_rounds() -> None:
    first = RoundResult(5, [DeliveredGroup("a", [2, 2], off_policy=1)], reprefilled=3)
    second = RoundResult(6, [DeliveredGroup("b", [1, 3], off_policy=1)], reprefilled=4)
    rounds = [
        timed(0.0, 1.0, first, decoded=2, prefilled=9, steps=1, after_end=8),
        timed(3.0, 4.0, second, decoded=2, prefilled=9, steps=2, after_end=1),
    ]
    row = metrics(Result("outside", rounds, samples_lost=1), Settings())
    assert row["delivered_tokens_per_s"] == 4.0
    assert (row["tokens_after_end"], row["reprefilled_tokens"], row["samples_lost"]) == (9, 7, 1)
    assert row["off_policy_share"] == 2 / 8
    assert (row["delivered_samples"], row["delivered_tokens"], row["decode_steps"]) == (4, 8, 3)


class IdleEngine:
    """A server with nothing to do."""

    async def counters(self) -> Counters:
        return snapshot(0.0, 0)

    settled = counters


class RecordingVariant:
    """A variant that records its calls and delivers nothing."""

    held = 0

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.handed_over, self.delivered, self._log = name, 0, Counter[str](), log

    async def push(self, checkpoint: Path) -> None:
        self._log.append(f"push {checkpoint.name}")

    async def round(self) -> RoundResult:
        self._log.append(self.name)
        self.handed_over += 1
        return RoundResult(0, [])

    async def drain(self) -> RoundResult:
        self._log.append(f"drain {self.name}")
        return RoundResult(0, [])


def test_variants_alternate_and_lost_samples_are_counted() -> None:
    log: list[str] = []
    settings = Settings(warmup_rounds=1, rounds=2, samples_per_group=3)
    variants = {name: cast(Variant, RecordingVariant(name, log)) for name in "ab"}
    results = asyncio.run(run_interleaved(variants, cast(EngineClient, IdleEngine()), settings, lambda *_: None))
    rounds = ["push v0", "a", "push v0", "b", "push v1", "b", "push v1", "a", "push v2", "a", "push v2", "b"]
    assert log == [*rounds, "drain a", "drain b"]
    assert [len(result.rounds) for result in results] == [2, 2]
    assert [result.samples_lost for result in results] == [9, 9]  # three groups each were taken, none was delivered
