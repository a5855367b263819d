"""The demo's arithmetic, on made-up snapshots and rounds: its figures must be what they say."""

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import pytest

from examples.april_demo.engine import Engine, Snapshot, Watch
from examples.april_demo.measure import (
    Measured,
    Result,
    figures,
    mean_running,
    run_interleaved,
    timeline,
    tokens_after_end,
)
from examples.april_demo.settings import Settings
from examples.april_demo.variants import Group, Outside, Round, Sample, Variant
from examples.sorting_task import make_problem


def watch_of(*snapshots: Snapshot) -> Watch:
    watch = Watch(cast(Engine, None))
    watch.snapshots = list(snapshots)
    return watch


def snapshot(time: float, running: int, decoded: int) -> Snapshot:
    return Snapshot(time, running, decoded, prefilled=0, steps=0)


def group_of(versions: list[list[int]]) -> Group:
    problem = make_problem(random.Random(0), 3)
    samples = [Sample(list(range(len(drawn))), drawn, done=True) for drawn in versions]
    return Group(problem, samples)


def test_decoded_at_is_linear_between_snapshots_and_flat_outside() -> None:
    watch = watch_of(snapshot(1.0, 4, 100), snapshot(3.0, 4, 140))
    assert [watch.decoded_at(moment) for moment in (0.0, 1.0, 2.0, 3.0, 9.0)] == [100, 100, 120, 140, 140]


def test_tokens_after_end() -> None:
    watch = watch_of(snapshot(1.0, 10, 100), snapshot(1.1, 10, 120), snapshot(1.2, 0, 170))
    quiet = watch.snapshots[-1]
    assert tokens_after_end(Round(0, [], tokens_after_end=7), watch, quiet) == 7  # the engine's own count
    assert tokens_after_end(Round(0, []), watch, quiet) == 0  # nothing was running any more
    # 120 of 170 were published when the last needed group finished, and a step of 10 was not yet counted.
    assert tokens_after_end(Round(0, [], ended_at=1.1), watch, quiet) == 40
    assert tokens_after_end(Round(0, [], ended_at=1.2), watch, quiet) == 0


def test_timeline_leaves_out_the_gaps_between_rounds() -> None:
    counts: dict[str, Any] = {"round": Round(0, []), "decoded": 0, "prefilled": 0, "steps": 0, "tokens_after_end": 0}
    rounds = [Measured(10.0, 12.0, **counts), Measured(20.0, 21.0, **counts)]
    seen = [snapshot(moment, running, 0) for moment, running in ((9.0, 9), (10.5, 2), (11.5, 1), (15.0, 9), (20.0, 3))]
    result = Result("april", rounds, seen)
    times, running, ends = timeline(result)
    assert ends == [2.0, 3.0]
    assert list(zip(times, running, strict=True)) == [(0, 0), (0.5, 2), (1.5, 1), (2.0, 0), (2.0, 3), (3.0, 0)]
    assert mean_running(result) == pytest.approx((2 * 1.0 + 1 * 0.5 + 3 * 1.0) / 3)


def test_figures_of_two_rounds() -> None:
    first = Round(5, [group_of([[5, 5], [4, 5]])], reprefilled_tokens=3)
    second = Round(6, [group_of([[6], [3, 6, 6]])], reprefilled_tokens=4)
    rounds = [
        Measured(0.0, 1.0, first, decoded=2, prefilled=9, steps=1, tokens_after_end=8),
        Measured(3.0, 4.0, second, decoded=2, prefilled=9, steps=2, tokens_after_end=1),
    ]
    row = figures(Result("outside", rounds, samples_lost=1), Settings())
    assert row["delivered_tokens_per_s"] == 4.0
    assert (row["tokens_after_end"], row["reprefilled_tokens"], row["samples_lost"]) == (9, 7, 1)
    assert row["off_policy_share"] == 2 / 8
    assert row["oldest_token_in_versions"] == 3
    assert (row["delivered_samples"], row["delivered_tokens"], row["decode_steps"]) == (4, 8, 3)


class Quiet(Watch):
    """A watch on an engine that has nothing to do."""

    async def look(self) -> Snapshot:
        return snapshot(0.0, 0, 0)


class Turn:
    """A variant that only writes down when it was asked."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.handed_over = 0
        self._log = log

    async def push(self, checkpoint: Path) -> None:
        self._log.append(f"push {checkpoint.name}")

    async def round(self) -> Round:
        self._log.append(self.name)
        self.handed_over += 1
        return Round(0, [])

    async def drain(self) -> Round:
        self._log.append(f"drain {self.name}")
        return Round(0, [])


def test_variants_take_turns_round_by_round_and_lost_samples_are_counted() -> None:
    log: list[str] = []
    settings = Settings(warmup_rounds=1, rounds=2, samples_per_group=3)
    variants = [cast(Variant, Turn(name, log)) for name in "ab"]
    results = asyncio.run(run_interleaved(variants, Quiet(cast(Engine, None)), settings, lambda *_: None))
    rounds = ["push v0", "a", "push v0", "b", "push v1", "b", "push v1", "a", "push v2", "a", "push v2", "b"]
    assert log == [*rounds, "drain a", "drain b"]
    assert [len(result.rounds) for result in results] == [2, 2]
    assert [result.samples_lost for result in results] == [9, 9]  # they took three groups each and delivered none


class LateRequest:
    """An engine that gets the second request only after the first abort."""

    def __init__(self) -> None:
        self.aborts = 0
        self.requests = 0
        self.aborted = [asyncio.Event(), asyncio.Event()]

    async def post(self, route: str, body: dict[str, Any]) -> Any:
        if route == "/abort_request":
            self.aborts += 1
            self.aborted[min(self.aborts, 2) - 1].set()
            return ""
        self.requests += 1
        number = self.requests
        if number == 1:
            return [{"output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}}}]
        await self.aborted[number - 2].wait()
        return [{"output_ids": [6], "meta_info": {"finish_reason": {"type": "abort"}}}]


def test_outside_aborts_again_what_its_abort_overtook() -> None:
    async def scene() -> tuple[LateRequest, Round]:
        engine = LateRequest()
        settings = Settings(groups=1, samples_per_group=1, over_provision=3.0)
        return engine, await Outside(cast(Engine, engine), settings).round()

    engine, done = asyncio.run(scene())
    assert (engine.requests, engine.aborts) == (3, 2)
    assert [group.samples[0].output_ids for group in done.groups] == [[5]]
