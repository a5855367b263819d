"""Sizes and cells of a run. The most important cells come first, so that a time budget omits the least important ones.

A cell is one row to come: a distribution, an ablation (None in the main tables), a variant, a repetition.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.pace_tables import TABLES
from bench.rollout.lengths import Lengths, named
from bench.rollout.variant import Plan
from sglang_april.cpu.pace import Table, load

MAIN = ("synchronous", "outside", "outside-retry3s", "april-keep", "april-recompute", "april-auto")
OTHERS = ("stale-reuse", "pause-retract", "pause-in-place", "async", "april-continue")
FEW = ("synchronous", "outside", "april-keep")
FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Over-sampling factors: started groups / needed groups."""
LIKELY = (1.25, 1.5, 2.0, 3.0)
"""Factors compared for each workload and variant, so that each runs at its best one."""
OVER_SAMPLING = "over-sampling"
DISTRIBUTIONS = ("constant", "pareto", "uniform")
GPU_GB = 141
"""Default GPU memory for the `/8` presets, an H200's."""
SERVER_GB, TOKEN_GB = 5, 112 * 1024 / 1e9
"""Qwen3-0.6B: weights plus working memory, and KV per token."""
EIGHTH_SLOTS = 64
"""Largest number of slots of the `/8` presets; larger batches make steps and rounds longer."""
EIGHTH_RUNNING = 0.2
"""Share of the pool for running samples of mean length; the rest holds long responses and the carry of three runs."""
EXTREME_WARM = 45
"""Warm-up limit in rounds for extreme lengths: a long response takes ten rounds or more, so the carry still grows after
fifteen."""
EXTREME_DRAIN = 24
"""Quotas of a drain with extreme lengths, whose carry oscillates with a period of more than eight rounds; a drain
starts and ends empty."""
TRAINER = (0.5, 1.0)
"""Trainer time per round as a share of the rollout time (a round of `async` alone), for variants that generate
meanwhile. The main table has them without a trainer."""


@dataclass(frozen=True)
class Cell:
    """One row to measure."""

    distribution: str
    variant: str
    repetition: int = 0
    ablation: str | None = None
    plan: Plan | None = None
    """Overrides the preset's plan."""
    trainer: float = 0.0
    together: str | None = None
    """Ablations with the same name alternate and form one table."""
    drain: bool = False
    """Whether to run a fixed set of prompts from an empty engine to an empty engine."""
    warm_limit: int | None = None
    """Overrides the preset's warm-up limit."""
    rounds: int | None = None
    """Overrides the preset's number of measured rounds."""

    @property
    def tries(self) -> bool:
        """Whether the cell measures an over-sampling factor; later cells use the best one."""
        return (self.together or "").endswith(OVER_SAMPLING)


@dataclass(frozen=True)
class Preset:
    """Sizes of one benchmark, and which cells it has."""

    name: str
    plan: Plan
    mean: float
    longest: int
    prompt_tokens: int
    repetitions: int
    shape: str = "tiny"
    """`tiny`: checkpoints are made by a script. Otherwise `--checkpoints` names two."""
    warm_limit: int = 15
    """Rounds after which measuring begins even if the carry is not steady; the row is then marked."""
    measured: int = 8
    distributions: tuple[str, ...] = DISTRIBUTIONS
    extreme_short: int = 20
    extreme: int = 100
    """`extreme`: 95 % of the responses have `extreme_short` tokens, 5 % have this many times as many."""
    ablations: bool = True
    """Whether ablations are run, including extreme lengths."""
    pool: int = 0
    """Tokens of each server's KV pool; 0: computed from the sizes."""

    @property
    def longest_of_all(self) -> int:
        """Tokens of the longest response under any distribution."""
        return max(self.longest, self.extreme_short * self.extreme) if self.ablations else self.longest

    @property
    def context(self) -> int:
        """The server's context length."""
        return self.prompt_tokens + self.longest_of_all + 8

    @property
    def pool_tokens(self) -> int:
        """KV pool tokens of each server: the partials of several alternating runs, and the longest context in every
        slot."""
        return self.pool or max(8 * self.plan.slots * int(self.mean), 3 * self.plan.slots * self.context)

    def lengths(self, distribution: str) -> Lengths:
        """A distribution at this size."""
        if distribution.startswith("extreme"):
            return named(distribution, self.extreme_short, 0)
        return named(distribution, self.mean, self.longest)

    def eighth(self, gpu_gb: float = GPU_GB) -> "Preset":
        """This preset with lengths and model ÷ 8 (Qwen3-0.6B), as many slots as two servers on one GPU have memory for,
        and the same ratio of quota to slots: all variants in a few minutes."""
        pool = int((0.85 * gpu_gb / 2 - SERVER_GB) / TOKEN_GB)
        slots = max(1, min(EIGHTH_SLOTS, round(EIGHTH_RUNNING * pool / (self.mean / 8 + self.prompt_tokens))))
        groups = max(2, round(self.plan.groups * slots / self.plan.slots))
        return replace(
            self,
            name=f"{self.name}/8",
            shape="qwen3-0.6b",
            plan=replace(self.plan, slots=slots, groups=groups),
            mean=self.mean / 8,
            longest=self.longest // 8,
            repetitions=1,
            warm_limit=6,
            pool=pool,
            ablations=False,
        )

    def cells(self) -> Iterator[Cell]:
        """All cells: the over-sampling factors, the main table, then the other tables, most important first."""
        if self.ablations:
            yield from self._twice(list(self._over_sampling()))
        for repetition in range(self.repetitions):
            yield from (Cell("lognormal", variant, repetition) for variant in MAIN)
        for table in self._tables():
            # One repetition is enough to choose the factor.
            yield from table if table[0].tries else self._twice(table)

    def _twice(self, table: list[Cell]) -> Iterator[Cell]:
        """Two repetitions of a table, one after the other, so that few carries exist at a time."""
        for repetition in range(min(2, self.repetitions)):
            yield from (replace(cell, repetition=repetition) for cell in table)

    def _tables(self) -> Iterator[list[Cell]]:
        """All tables but the main one, each preceded by its over-sampling factors."""
        tries = self._tries if self.ablations else lambda *_: ()
        yield from tries([Cell("lognormal", variant) for variant in OTHERS[:-1]])
        yield [Cell("lognormal", variant) for variant in OTHERS]
        for distribution in self.distributions:
            yield from tries([Cell(distribution, "outside")])
            yield [Cell(distribution, variant) for variant in MAIN]
        if not self.ablations:
            return
        for share in TRAINER:
            yield [Cell("lognormal", v, ablation=f"trainer {share:g}", trainer=share) for v in OTHERS[3:]]
        yield [Cell("lognormal", variant, ablation="drain", drain=True) for variant in FEW]
        plan = self.plan
        yield [
            Cell("lognormal", "april-keep", ablation=name, plan=changed, together="knobs")
            for name, changed in self._knobs()
        ]
        for n in (1, 8):
            changed = replace(plan, n=n, groups=plan.samples // n)
            yield from self._tries([Cell("lognormal", "outside", ablation=f"n {n}", plan=changed)])
            yield [Cell("lognormal", variant, ablation=f"n {n}", plan=changed) for variant in FEW]
        extreme = Cell(f"extreme:{self.extreme}", "outside", warm_limit=EXTREME_WARM)
        yield from self._tries([extreme])
        fixed = replace(extreme, ablation="drain", drain=True, rounds=EXTREME_DRAIN)
        yield [replace(fixed, variant=variant) for variant in FEW]
        for bound in (None, 5):
            changed = replace(plan, max_staleness=bound)
            name = f"max_staleness {'unlimited' if bound is None else bound}"
            yield [replace(extreme, variant=variant, ablation=name, plan=changed) for variant in FEW]

    def _over_sampling(self) -> Iterator[Cell]:
        """Over-sampling factors: of the client-side baseline, and of the batch quota with a fixed one."""
        driven = f"{OVER_SAMPLING} demand-driven"
        yield Cell("lognormal", "april-keep", ablation=driven, together=OVER_SAMPLING)
        both = [Cell("lognormal", "outside"), Cell("lognormal", "april-factor")]
        yield from next(self._tries(both, FACTORS))

    def _tries(self, cells: list[Cell], factors: tuple[float, ...] = LIKELY) -> Iterator[list[Cell]]:
        """One table: the cells at each factor."""
        table = []
        for factor in factors:
            for cell in cells:
                together = f"{cell.ablation}, {OVER_SAMPLING}" if cell.ablation else OVER_SAMPLING
                plan = replace(cell.plan or self.plan, over_sampling=factor)
                table.append(replace(cell, ablation=f"{together} {factor:g}", plan=plan, together=together))
        yield table

    def _knobs(self) -> Iterator[tuple[str, Plan]]:
        """Names and plans of the batch quota with one setting changed, after the unchanged one."""
        plan = self.plan
        yield "as it is", plan
        yield "max_staleness 5", replace(plan, max_staleness=5)
        for share in (0.5, 0.75):
            yield f"concurrency {round(plan.slots * share)}", replace(plan, concurrency=round(plan.slots * share))
        yield "concurrency auto", replace(plan, concurrency="auto")
        yield "quota by sample", replace(plan, unit="sample")
        yield "cohort", replace(plan, quota_mode="cohort")


class AllVariants(Preset):
    """Every variant, without ablations."""

    def cells(self) -> Iterator[Cell]:
        for repetition in range(self.repetitions):
            yield from (Cell("lognormal", variant, repetition) for variant in MAIN)
        yield from (Cell("lognormal", variant) for variant in OTHERS)


class FewVariants(Preset):
    """Synchronous, client-side and batch-quota rounds, without ablations."""

    def cells(self) -> Iterator[Cell]:
        for table in self._tries([Cell("lognormal", "outside")]):
            yield from table
        yield from (Cell("lognormal", variant, each) for each in range(self.repetitions) for variant in FEW)


class Tiny(Preset):
    """Every variant once, a filter and a drain: a smoke test whose rates are not measurements."""

    def cells(self) -> Iterator[Cell]:
        yield from (Cell("lognormal", variant) for variant in (*MAIN, *OTHERS))
        yield from (Cell("lognormal", variant, ablation="drain", drain=True) for variant in FEW)
        changed = replace(self.plan, filtered=True)
        yield from (Cell("lognormal", v, ablation="filter", plan=changed) for v in (*MAIN, *OTHERS))


@dataclass(frozen=True)
class Paced(Preset):
    """A small model on the CPU platform at a GPU's pace (`--april-cpu-pace`)."""

    pace: Path = TABLES / "qwen3-4b-h100.json"

    @property
    def table(self) -> Table:
        """The table of step times."""
        return load(str(self.pace))

    def limit(self, distribution: str) -> float:
        """Tokens/s of a full batch at the workload's mean context, by the table; nothing is probed."""
        context = self.prompt_tokens + self.lengths(distribution).running_mean / 2
        return 1e3 * self.plan.slots / self.table.decode.at(self.plan.slots, context)

    def shorter(self, divisor: int) -> "Paced":
        """This preset with lengths divided, for short calls."""
        return replace(
            self,
            name=f"{self.name}/{divisor}",
            mean=self.mean / divisor,
            longest=self.longest // divisor,
            measured=8,
        )

    def cells(self) -> Iterator[Cell]:
        for repetition in range(self.repetitions):
            yield from (Cell("lognormal", variant, repetition) for variant in MAIN)
        yield from (Cell("lognormal", variant) for variant in OTHERS[3:])


_CPU = Plan(slots=64, groups=24, n=4, over_sampling=1.5)
_APRIL = Plan(slots=256, groups=32, n=8, over_sampling=2.0)
_PRESETS: tuple[Preset, ...] = (
    Tiny("tiny", Plan(slots=16, groups=3, n=2), 8, 40, 6, 1, warm_limit=1, measured=2),
    Preset("cpu", _CPU, 64, 1024, 16, 5),
    FewVariants("cpu-long", _CPU, 512, 4096, 16, 2, ablations=False),
    Preset("april", _APRIL, 4096, 16384, 256, 2, shape="qwen3-4b", extreme_short=32, extreme=500),
    AllVariants("long", replace(_APRIL, slots=128), 16384, 49152, 512, 1, shape="qwen3-4b"),
    AllVariants("short-rounds", replace(_APRIL, groups=8, over_sampling=4.0), 4096, 16384, 256, 2, shape="qwen3-4b"),
    AllVariants("dapo", replace(_APRIL, filtered=True), 4096, 16384, 256, 2, shape="qwen3-4b"),
)
_PACED = Paced("april-paced", _APRIL, 4096, 16384, 256, 1, shape="paced", warm_limit=6, measured=4, ablations=False)
_PACED_30B_A3B = replace(_PACED, name="april-paced-30b-a3b", pace=TABLES / "qwen3-30b-a3b-h100.json")
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}
PRESETS |= {f"{name}/8": PRESETS[name].eighth() for name in ("april", "long", "short-rounds", "dapo")}
PRESETS |= {preset.name: preset for preset in (_PACED, _PACED.shorter(4), _PACED.shorter(8), _PACED_30B_A3B)}
