"""A discrete-event model of rounds on one engine or many, for bench/simulate.py; `VARIANTS` describes the variants.

A round begins with a push and the variant's own overhead beside it, on all engines at once. It ends in the step that
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
    """What is started: the quota, which all of it must finish; so many times as many, counted at a round's start or at
    every step (`refilled`); whatever there are slots for."""
    left: Literal["partials", "running"] = "partials"
    """What a round's end makes of the samples that run."""
    partials: Literal["prefilled", "found", "kept"] = "prefilled"
    """What a partial needs: a prefill of all its tokens, of one behind a prefix that is found, or none."""
    between: Literal["gap_s", "abort_s", ""] = "gap_s"
    """The cost beside the push."""
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
    """Measured rounds: seconds and delivered tokens of all engines, and the seconds of a mean engine in decodes, in
    prefills, and between rounds; in what is left of them it waited for others."""

    engines: int = 1
    seconds: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    between_s: float = 0.0

    @property
    def rate(self) -> float:
        """Delivered tokens/s of an engine."""
        return self.tokens / self.seconds / self.engines


class Simulation:
    """Rounds of one variant. `plan`: the slots of an engine and the quota of all of them."""

    def __init__(
        self,
        variant: str,
        plan: Plan,
        stream: Stream,
        costs: Costs,
        gather: float = PrefillBatcher.STEPS,
        engines: int = 1,
    ) -> None:
        self._way, self._plan, self._stream, self._costs = VARIANTS[variant], plan, stream, costs
        ours, found = self._way.supply == "demand", self._way.partials == "found"
        self._engines = [
            SimulatedEngine(costs, plan.slots, ours=ours, gather=gather, found=found) for _ in range(engines)
        ]
        self._pile: list[SimulatedGroup] = []
        self._clock = 0.0
        self.outcome = Outcome(engines)

    def run(self, warm: int = WARM, measured: int = MEASURED) -> Outcome:
        """The steady state's figures."""
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
        way, began = self._way, self._clock
        gap = self._costs.push_s + way.sleep_s + (getattr(self._costs, way.between) if way.between else 0.0)
        for engine in self._engines:
            engine.clock, engine.number = began + gap, number
        if way.supply == "quota":
            self._start(self._plan.groups)
        elif way.supply == "factor":
            self._top_up()
        self._until_the_quota()
        delivered, self._pile = self._pile[: self._plan.groups], self._pile[self._plan.groups :]
        if way.left == "partials":
            self._suspend()
        self._clock = max(engine.clock for engine in self._engines)
        self.outcome.tokens += sum(sum(group.prompt.lengths) for group in delivered)
        self.outcome.between_s += gap
        self.outcome.seconds += self._clock - began

    def _until_the_quota(self) -> None:
        ends: list[tuple[float, int]] = []
        for index in range(len(self._engines)):
            self._go_on(index, ends)
        while len(self._pile) < self._plan.groups:
            _, index = heapq.heappop(ends)
            self._pile += self._engines[index].end()
            if len(self._pile) < self._plan.groups:
                self._go_on(index, ends)
            else:
                now = self._engines[index].clock
                for _, other in ends:
                    self._pile += self._engines[other].end(now)

    def _go_on(self, index: int, ends: list[tuple[float, int]]) -> None:
        engine = self._engines[index]
        if self._way.supply == "refilled" and len(self._pile) < self._plan.groups:
            self._top_up()
        while self._way.supply == "demand" and engine.wanting > 0:
            engine.add(*self._stream.take(1))
        at = engine.next()
        if at is not None:
            heapq.heappush(ends, (at, index))

    def _top_up(self) -> None:
        begun = sum(len(engine.begun()) for engine in self._engines)
        surplus = len(self._pile) if self._way.surplus_counts else 0
        self._start(round(self._plan.over_sampling * self._plan.groups) - begun - surplus)

    def _start(self, groups: int) -> None:
        """New groups, each on the engine that has least to do."""
        loads = [(len(engine.running) + len(engine.queue), index) for index, engine in enumerate(self._engines)]
        heapq.heapify(loads)
        for prompt in self._stream.take(groups):
            load, index = loads[0]
            self._engines[index].add(prompt)
            heapq.heapreplace(loads, (load + len(prompt.lengths), index))

    def _suspend(self) -> None:
        kept = self._way.partials == "kept"
        for engine in self._engines:
            if kept:
                engine.clock += sum(sample.tokens for sample in engine.running) * self._costs.move_token_s
            engine.suspend(kept=kept)
