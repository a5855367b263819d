"""A discrete-event model of rounds on one engine or many, for bench/simulate.py; `VARIANTS` describes the variants.

A round begins with a push and the variant's own overhead, on all engines at once. It ends in the step that
completes the quota on any engine, and every engine finishes its step in flight. Everything is counted in engine steps
(bench/simulated_engine.py); only lengths are random. There is no HTTP, no tokenizer, and no overlap of the scheduler's
work with the device's.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

from bench.rollout.variant import Plan
from bench.rollout.workload import Stream
from bench.simulated_engine import Costs, SimulatedEngine, SimulatedGroup
from sglang_april.scheduler.admission import PrefillBatcher

WARM, MEASURED = 12, 40


@dataclass(frozen=True)
class SimulatedVariant:
    """How a variant runs its rounds."""

    supply: Literal["quota", "factor", "refilled", "demand"]
    """What a round starts: the quota itself (`quota`), the over-sampling factor times the quota at its start (`factor`)
    or at every step (`refilled`), or as many samples as there are slots (`demand`)."""
    left: Literal["partials", "running"] = "partials"
    """The state of running samples when a round ends."""
    partials: Literal["prefilled", "found", "kept"] = "prefilled"
    """What a partial needs: a prefill of all its tokens, a prefill of one token after a cached prefix, or none."""
    between: Literal["gap_s", "abort_s", ""] = "gap_s"
    """The cost between rounds in addition to the push."""
    sleep_s: float = 0.0
    surplus_counts: bool = True
    """Whether finished surplus replaces groups that would otherwise be started."""


VARIANTS = {
    "synchronous": SimulatedVariant("quota"),
    "outside": SimulatedVariant("factor", between="abort_s"),
    "outside-retry3s": SimulatedVariant("factor", between="abort_s", sleep_s=3.0),
    "stale-reuse": SimulatedVariant("factor", partials="found", between="abort_s"),
    "pause-retract": SimulatedVariant("factor", surplus_counts=False),
    "pause-in-place": SimulatedVariant("factor", "running", surplus_counts=False),
    "async": SimulatedVariant("refilled", "running", between="", surplus_counts=False),
    "april-keep": SimulatedVariant("demand", partials="kept"),
    "april-recompute": SimulatedVariant("demand"),
    "april-auto": SimulatedVariant("demand", partials="kept"),  # where that costs less, as it does in every preset
    "april-continue": SimulatedVariant("demand", "running", between=""),
}


@dataclass
class Outcome:
    """Measured rounds: seconds and delivered tokens of all engines, and a mean engine's seconds in decodes, in prefills
    and between rounds. The rest is time in which it waited for other engines."""

    engines: int = 1
    seconds: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    between_s: float = 0.0

    @property
    def rate(self) -> float:
        """Delivered tokens/s per engine."""
        return self.tokens / self.seconds / self.engines


class Simulation:
    """Rounds of one variant. `plan`: the slots of one engine, and the quota over all engines."""

    def __init__(
        self,
        variant: str,
        plan: Plan,
        stream: Stream,
        costs: Costs,
        batching: float = PrefillBatcher.STEPS,
        engines: int = 1,
    ) -> None:
        self._variant, self._plan, self._stream, self._costs = VARIANTS[variant], plan, stream, costs
        quota, cached = self._variant.supply == "demand", self._variant.partials == "found"
        self._engines = [
            SimulatedEngine(costs, plan.slots, shares_prompts=quota, batching=batching, prefix_cached=cached)
            for _ in range(engines)
        ]
        self._finished: list[SimulatedGroup] = []
        self._clock = 0.0
        self.outcome = Outcome(engines)

    def run(self, warm: int = WARM, measured: int = MEASURED) -> Outcome:
        """Simulate warm-up and measured rounds; returns the measured ones."""
        for number in range(warm + measured):
            if number == warm:
                self.outcome = Outcome(len(self._engines))
                for engine in self._engines:
                    engine.decode_s = engine.prefill_s = 0.0
            self._round(number)
        self.outcome.decode_s = sum(engine.decode_s for engine in self._engines) / len(self._engines)
        self.outcome.prefill_s = sum(engine.prefill_s for engine in self._engines) / len(self._engines)
        return self.outcome

    def _round(self, number: int) -> None:
        variant, began = self._variant, self._clock
        gap = self._costs.push_s + variant.sleep_s + (getattr(self._costs, variant.between) if variant.between else 0.0)
        for engine in self._engines:
            engine.clock, engine.round_number = began + gap, number
        if variant.supply == "quota":
            self._start(self._plan.groups)
        elif variant.supply == "factor":
            self._top_up()
        self._run_until_quota()
        delivered, self._finished = self._finished[: self._plan.groups], self._finished[self._plan.groups :]
        if variant.left == "partials":
            self._suspend()
        self._clock = max(engine.clock for engine in self._engines)
        self.outcome.tokens += sum(sum(group.prompt.lengths) for group in delivered)
        self.outcome.between_s += gap
        self.outcome.seconds += self._clock - began

    def _run_until_quota(self) -> None:
        ends: list[tuple[float, int]] = []
        for index in range(len(self._engines)):
            self._advance(index, ends)
        while len(self._finished) < self._plan.groups:
            _, index = heapq.heappop(ends)
            self._finished += self._engines[index].end()
            if len(self._finished) < self._plan.groups:
                self._advance(index, ends)
            else:
                now = self._engines[index].clock
                for _, other in ends:
                    self._finished += self._engines[other].end(now)

    def _advance(self, index: int, ends: list[tuple[float, int]]) -> None:
        engine = self._engines[index]
        if self._variant.supply == "refilled" and len(self._finished) < self._plan.groups:
            self._top_up()
        while self._variant.supply == "demand" and engine.missing > 0:
            engine.add(*self._stream.take(1))
        at = engine.next()
        if at is not None:
            heapq.heappush(ends, (at, index))

    def _top_up(self) -> None:
        begun = sum(len(engine.open_groups()) for engine in self._engines)
        surplus = len(self._finished) if self._variant.surplus_counts else 0
        self._start(round(self._plan.over_sampling * self._plan.groups) - begun - surplus)

    def _start(self, groups: int) -> None:
        """Start new groups, each on the engine with the fewest samples."""
        loads = [(len(engine.running) + len(engine.queue), index) for index, engine in enumerate(self._engines)]
        heapq.heapify(loads)
        for prompt in self._stream.take(groups):
            load, index = loads[0]
            self._engines[index].add(prompt)
            heapq.heapreplace(loads, (load + len(prompt.lengths), index))

    def _suspend(self) -> None:
        kept = self._variant.partials == "kept"
        for engine in self._engines:
            if kept:
                engine.clock += sum(sample.tokens for sample in engine.running) * self._costs.move_token_s
            engine.suspend(kept=kept)
