"""Servers and checkpoints that cells run on, and probes of the machine between their rounds."""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean

from bench.record import Row
from bench.rollout.engine_client import EngineClient
from bench.rollout.lengths import Lengths
from bench.rollout.limit import decode_rate
from bench.rollout.presets import OVER_SAMPLING, Cell, Preset
from bench.rollout.variant import Plan
from bench.step_costs import BATCHES, Observed, probe


@dataclass
class Testbed:
    """Two servers, two checkpoints, and measurements of the machine."""

    stock: EngineClient
    april: EngineClient
    checkpoints: tuple[Path, Path]
    preset: Preset
    seed: int = 0
    given_limit: float | None = None
    """Full-batch rate in tokens/s that replaces the measurement."""
    observed: Observed = field(default_factory=Observed)
    """Step costs, accumulated over the whole run."""
    _batches: Iterator[int] = field(default_factory=lambda: itertools.cycle(BATCHES))
    rollout_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds of an `async` round without a trainer, by distribution. Trainer times are shares of it."""
    _tried: dict[tuple[str, str, int], dict[float, list[float]]] = field(default_factory=dict)
    """For each (variant, distribution, n) and over-sampling factor: computed and not wasted tokens/s as shares of the
    limit. Delivered tokens would include changes of the carry."""

    def engine(self, variant: str) -> EngineClient:
        """The server that a variant runs on: the patched one for the batch quota, else the stock one."""
        return self.april if variant.startswith("april") else self.stock

    def lengths(self, distribution: str) -> Lengths:
        """A distribution at the preset's size."""
        return self.preset.lengths(distribution)

    def note(self, row: Row) -> None:
        """Record the result of a row that measured an over-sampling factor."""
        if (row["together"] or "").endswith(OVER_SAMPLING):
            shares = self._tried.setdefault((row["variant"], row["distribution"], row["plan"]["n"]), {})
            kept = 1 + row["carry_grown"] / row["delivered_tokens"]
            shares.setdefault(row["plan"]["over_sampling"], []).append(row["share_of_limit"] * kept)

    def note_time(self, row: Row) -> None:
        """Record the duration of an `async` round without a trainer."""
        if row["variant"] == "async" and row["ablation"] is None:
            self.rollout_s[row["distribution"]] = row["seconds"] / row["rounds"]

    def plan(self, cell: Cell) -> Plan:
        """A cell's plan at the best over-sampling factor measured for its variant, if any.

        `outside-retry3s` uses the factor of `outside`, from which it differs only in how a round ends."""
        plan = cell.plan or self.preset.plan
        variant = "outside" if cell.variant == "outside-retry3s" else cell.variant
        tried = self._tried.get((variant, cell.distribution, plan.n), {})
        if cell.tries or not tried:
            return plan
        return replace(plan, over_sampling=max(tried, key=lambda factor: mean(tried[factor])))

    async def limit(self, distribution: str) -> float:
        """Current full-batch rate in tokens/s of the stock server, the reference for both servers."""
        if self.given_limit is not None:
            return self.given_limit
        slots, tokens = self.preset.plan.slots, self.preset.prompt_tokens
        decoded = await decode_rate(self.stock, slots, self._length(distribution), tokens)
        self.observed.decodes += decoded.halves
        return decoded.rate

    async def probe(self, distribution: str) -> tuple[float, Observed]:
        """The current full-batch rate, and the step costs that bench.simulate needs."""
        if self.given_limit is not None:
            return self.given_limit, Observed()
        known = len(self.observed.decodes)
        rate = await self.limit(distribution)
        slots, tokens = self.preset.plan.slots, self.preset.prompt_tokens
        batch = min(slots, next(self._batches))
        seen = await probe(self.stock, self.checkpoints[0], slots, self._length(distribution), tokens, batch)
        full = Observed(self.observed.decodes[known:])
        self.observed.add(seen)
        full.add(seen)
        return rate, full

    def _length(self, distribution: str) -> int:
        return max(40, min(self.preset.longest_of_all, round(self.lengths(distribution).running_mean)))


class MachineProbe:
    """Probes of the machine around and between the rounds of alternating cells."""

    def __init__(self, testbed: Testbed, cell: Cell) -> None:
        self._testbed, self._distribution = testbed, cell.distribution
        self._closely = cell.ablation is None
        self.limits: list[float] = []
        self.observed = Observed()

    async def measure(self) -> None:
        """Measure the full batch and, for a main table, the step costs."""
        if not self._closely:
            known = len(self._testbed.observed.decodes)
            self.limits.append(await self._testbed.limit(self._distribution))
            self.observed.decodes += self._testbed.observed.decodes[known:]
            return
        rate, seen = await self._testbed.probe(self._distribution)
        self.limits.append(rate)
        self.observed.add(seen)

    def costs(self) -> Row | None:
        """Fields of `Costs` (bench.simulated_engine) measured during these rounds, or None."""
        return asdict(self.observed.costs()) if self.observed.stalls else None
