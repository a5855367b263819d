"""Where cells run, and the looks at the machine between their rounds."""

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
from bench.step_costs import BATCHES, Observed, look


@dataclass
class Testbed:
    """Where cells run: two servers, two checkpoints, and what was measured of the machine."""

    stock: EngineClient
    april: EngineClient
    checkpoints: tuple[Path, Path]
    preset: Preset
    seed: int = 0
    given_limit: float | None = None
    """Full-batch rate in tokens/s, where it is not to be measured."""
    observed: Observed = field(default_factory=Observed)
    """What the steps of this machine cost, over the whole run."""
    _batches: Iterator[int] = field(default_factory=lambda: itertools.cycle(BATCHES))
    rollout_s: dict[str, float] = field(default_factory=dict)
    """Mean seconds of a round of `async` whose trainer takes no time, by distribution, in this process: what a
    trainer's time is a share of."""
    _tried: dict[tuple[str, str, int], dict[float, list[float]]] = field(default_factory=dict)
    """Of a variant, a distribution and n, at each factor that was tried: what was computed and is kept, as shares of
    the limit. In what is delivered the carry is, too, which may come in waves."""

    def engine(self, variant: str) -> EngineClient:
        """Ours for our variants, the stock one for the others."""
        return self.april if variant.startswith("april") else self.stock

    def lengths(self, distribution: str) -> Lengths:
        """A distribution at the preset's size."""
        return self.preset.lengths(distribution)

    def note(self, row: Row) -> None:
        """What a row says to those that follow: how good a factor of over-sampling is."""
        if (row["together"] or "").endswith(OVER_SAMPLING):
            shares = self._tried.setdefault((row["variant"], row["distribution"], row["plan"]["n"]), {})
            kept = 1 + row["carry_grown"] / row["delivered_tokens"]
            shares.setdefault(row["plan"]["over_sampling"], []).append(row["share_of_limit"] * kept)

    def note_time(self, row: Row) -> None:
        """How long a round of `async` takes by itself."""
        if row["variant"] == "async" and row["ablation"] is None:
            self.rollout_s[row["distribution"]] = row["seconds"] / row["rounds"]

    def plan(self, cell: Cell) -> Plan:
        """A cell's sizes, at the factor of over-sampling that was the best one for its variant, if any was tried.

        `outside-retry3s` differs from `outside` in how a round ends only."""
        plan = cell.plan or self.preset.plan
        variant = "outside" if cell.variant == "outside-retry3s" else cell.variant
        tried = self._tried.get((variant, cell.distribution, plan.n), {})
        if cell.tries or not tried:
            return plan
        return replace(plan, over_sampling=max(tried, key=lambda factor: mean(tried[factor])))

    async def limit(self, distribution: str) -> float:
        """Full-batch rate in tokens/s, now, on the stock server: the ruler of both. Machines change within a minute."""
        if self.given_limit is not None:
            return self.given_limit
        slots, tokens = self.preset.plan.slots, self.preset.prompt_tokens
        decoded = await decode_rate(self.stock, slots, self._length(distribution), tokens)
        self.observed.decodes += decoded.halves
        return decoded.rate

    async def look(self, distribution: str) -> tuple[float, Observed]:
        """The limit, and what else the model of bench.simulate is to know of the machine, now."""
        if self.given_limit is not None:
            return self.given_limit, Observed()
        known = len(self.observed.decodes)
        rate = await self.limit(distribution)
        slots, tokens = self.preset.plan.slots, self.preset.prompt_tokens
        batch = min(slots, next(self._batches))
        seen = await look(self.stock, self.checkpoints[0], slots, self._length(distribution), tokens, batch)
        full = Observed(self.observed.decodes[known:])
        self.observed.add(seen)
        full.add(seen)
        return rate, full

    def _length(self, distribution: str) -> int:
        return max(40, min(self.preset.longest_of_all, round(self.lengths(distribution).running_mean)))


class MachineProbe:
    """The looks at the machine around and between the rounds of cells that take turns."""

    def __init__(self, bed: Testbed, cell: Cell) -> None:
        self._bed, self._distribution = bed, cell.distribution
        self._closely = cell.ablation is None
        self.limits: list[float] = []
        self.observed = Observed()

    async def look(self) -> None:
        """At the full batch, and in a main table at what else a step costs."""
        if not self._closely:
            known = len(self._bed.observed.decodes)
            self.limits.append(await self._bed.limit(self._distribution))
            self.observed.decodes += self._bed.observed.decodes[known:]
            return
        rate, seen = await self._bed.look(self._distribution)
        self.limits.append(rate)
        self.observed.add(seen)

    def costs(self) -> Row | None:
        """What a step cost meanwhile, where that was looked at: `Costs` of bench.simulated_rounds."""
        return asdict(self.observed.costs()) if self.observed.stalls else None
