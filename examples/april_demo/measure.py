"""Runs the variants' rounds and turns them into figures; every figure is counted, none is assumed.

The clock of a round runs from the start of its push to the reply; what a trainer would do between rounds is not in it
(the watch reads the engine's counters there). Figures are of the measured rounds, after the warm-up rounds.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from examples.april_demo.engine import Snapshot, Watch
from examples.april_demo.settings import Settings
from examples.april_demo.variants import Group, Round, Variant
from examples.sorting_task import score


@dataclass(frozen=True)
class Measured:
    """One measured round: when it ran (the wall clock), what it delivered, and the engine's counters around it."""

    start: float
    end: float
    round: Round
    decoded: int
    prefilled: int
    steps: int
    tokens_after_end: int

    @property
    def seconds(self) -> float:
        """From the start of the push to the reply."""
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Delivered tokens."""
        return sum(len(sample.output_ids) for group in self.round.groups for sample in group.samples)


@dataclass
class Result:
    """All that is known of a variant after its run."""

    name: str
    rounds: list[Measured] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    samples_lost: int = 0
    samples_twice: int = 0


Progress = Callable[[int, Result], None]
"""Called after every round with the rounds that the variant has done, warm-up included."""


async def run_interleaved(
    variants: Sequence[Variant], watch: Watch, settings: Settings, progress: Progress
) -> list[Result]:
    """Every variant's warm-up and measured rounds, round by round in turn so that the machine's moods meet all alike
    (who is first changes too), and a drain round each that shows whether anything was lost."""
    results = [Result(variant.name) for variant in variants]
    delivered: list[Counter[str]] = [Counter() for _ in variants]
    checkpoints = itertools.cycle(settings.checkpoints)
    turns = list(range(len(variants)))
    async with watch.watching():
        for number in range(settings.warmup_rounds + settings.rounds):
            checkpoint = next(checkpoints)
            first = number % len(turns)
            for turn in turns[first:] + turns[:first]:
                measured = await run_round(variants[turn], watch, checkpoint)
                count_delivered(delivered[turn], measured.round.groups)
                if number >= settings.warmup_rounds:
                    results[turn].rounds.append(measured)
                progress(number + 1, results[turn])
        for variant, counts in zip(variants, delivered, strict=True):
            count_delivered(counts, (await variant.drain()).groups)
    for variant, result, counts in zip(variants, results, delivered, strict=True):
        result.snapshots = watch.snapshots
        result.samples_lost = variant.handed_over * settings.samples_per_group - len(counts)
        result.samples_twice = sum(counts.values()) - len(counts)
    return results


async def run_round(variant: Variant, watch: Watch, checkpoint: Path) -> Measured:
    """A push and a round, with the engine's counters read while it is quiet before and after."""
    before = await watch.settled()
    start = time.time()
    await variant.push(checkpoint)
    done = await variant.round()
    end = time.time()
    after = await watch.settled()
    return Measured(
        start,
        end,
        done,
        decoded=after.decoded - before.decoded,
        prefilled=after.prefilled - before.prefilled,
        steps=after.steps - before.steps,
        tokens_after_end=tokens_after_end(done, watch, after),
    )


def count_delivered(delivered: Counter[str], groups: list[Group]) -> None:
    """Counts every finished sample under its prompt and index."""
    for group in groups:
        delivered.update(f"{group.problem.id}/{index}" for index, sample in enumerate(group.samples) if sample.done)


def tokens_after_end(done: Round, watch: Watch, after: Snapshot) -> int:
    """Tokens that the engine decoded after the last needed group had finished.

    The engine's own count where it has one; none where nothing was running any more. For a client that aborts: the
    scheduler's counter when all is quiet, less the counter when that group's answer left the server. A snapshot is
    published just before its own step is counted, so one step of the batch is taken off: the figure errs on the low
    side.
    """
    if done.tokens_after_end is not None:
        return done.tokens_after_end
    if done.ended_at is None:
        return 0
    step = max(
        (snapshot.running for snapshot in watch.snapshots if abs(snapshot.time - done.ended_at) < 0.1), default=0
    )
    return max(0, round(after.decoded - watch.decoded_at(done.ended_at) - step))


def figures(result: Result, settings: Settings) -> dict[str, Any]:
    """The row of a variant in the table and in summary.json."""
    rounds = result.rounds
    seconds = sum(measured.seconds for measured in rounds)
    tokens = sum(measured.tokens for measured in rounds)
    samples = [
        (measured.round.version, group.problem, sample)
        for measured in rounds
        for group in measured.round.groups
        for sample in group.samples
    ]
    lengths = [len(sample.output_ids) for _, _, sample in samples]
    old = sum(version > drawn for version, _, sample in samples for drawn in sample.versions)
    return {
        "variant": result.name,
        "delivered_tokens_per_s": round(tokens / seconds, 1),
        "tokens_after_end": sum(measured.tokens_after_end for measured in rounds),
        "reprefilled_tokens": sum(measured.round.reprefilled_tokens for measured in rounds),
        "samples_lost": result.samples_lost,
        "off_policy_share": round(old / tokens, 4),
        "samples_delivered_twice": result.samples_twice,
        "rollout_seconds": round(seconds, 3),
        "delivered_tokens": tokens,
        "delivered_samples": len(samples),
        "decoded_tokens": sum(measured.decoded for measured in rounds),
        "decode_steps": sum(measured.steps for measured in rounds),
        "prefilled_tokens": sum(measured.prefilled for measured in rounds),
        "mean_running": round(mean_running(result), 2),
        "slots": settings.slots,
        "length_median": median(lengths),
        "length_max": max(lengths),
        "ended_by_themselves": round(mean(length < settings.max_new_tokens for length in lengths), 4),
        "mean_score": round(mean(score(problem, sample.output_ids) for _, problem, sample in samples), 4),
        "oldest_token_in_versions": max(version - min(sample.versions) for version, _, sample in samples),
        "round_seconds": [round(measured.seconds, 3) for measured in rounds],
    }


def timeline(result: Result) -> tuple[list[float], list[int], list[float]]:
    """The running batch over rollout time, the measured rounds one after the other without the gaps between them:
    times, samples running from then on, and the ends of the rounds."""
    times, running, ends = [0.0], [0], []
    clock = 0.0
    for measured in result.rounds:
        for snapshot in result.snapshots:
            if measured.start <= snapshot.time <= measured.end:
                times.append(clock + snapshot.time - measured.start)
                running.append(snapshot.running)
        clock += measured.seconds
        times.append(clock)
        running.append(0)
        ends.append(clock)
    return times, running, ends


def mean_running(result: Result) -> float:
    """The mean of the running batch over rollout time."""
    times, running, ends = timeline(result)
    area = sum(count * (later - now) for count, now, later in zip(running, times, times[1:], strict=False))
    return area / ends[-1]
