"""What is run: sizes, and the cells in the order of their worth, so that a budget cuts from the end.

A cell is one row to come: a distribution, an ablation (None in the main tables), a variant, a repetition.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.rollout.lengths import Lengths, named
from bench.rollout.variant import Plan

MAIN = ("synchronous", "outside", "outside-retry3s", "april-keep", "april-recompute", "april-auto")
OTHERS = ("stale-reuse", "pause-retract", "pause-in-place", "async", "april-continue")
FEW = ("synchronous", "outside", "april-keep")
FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0)
"""Of over-sampling: so many times the groups that are needed are started."""
LIKELY = (1.25, 1.5, 2.0, 3.0)
"""What is tried for each workload and each way to keep requests in flight, so that each runs at its own best."""
OVER_SAMPLING = "over-sampling"
DISTRIBUTIONS = ("constant", "pareto", "uniform")
GPU_GB = 141
"""Memory that the `/8` presets are sized for where none is named: an H200's."""
SERVER_GB, TOKEN_GB = 5, 112 * 1024 / 1e9
"""Qwen3-0.6B's weights and working memory, and its KV of a token."""
EIGHTH_SLOTS = 64
"""At most: a step of more rows takes longer, and a round with it."""
EIGHTH_RUNNING = 0.2
"""Share of a pool for what runs at the workload's mean: the rest is for long responses and for the carry of three
batch-quota runs."""
EXTREME_WARM = 45
"""Rounds at most before measuring with extreme lengths: a long response takes ten rounds and more, so that fifteen end
while the carry is still growing."""
EXTREME_DRAIN = 24
"""Quotas of a drain with extreme lengths, whose waves are longer than eight rounds; from empty to empty they do not
count."""
TRAINER = (0.5, 1.0)
"""Trainer time per round as a share of the rollout (a round of `async` by itself), for what generates meanwhile; with
none they are in the main table."""


@dataclass(frozen=True)
class Cell:
    """One row to come."""

    distribution: str
    variant: str
    repetition: int = 0
    ablation: str | None = None
    plan: Plan | None = None
    """Where it differs from the preset's."""
    trainer: float = 0.0
    together: str | None = None
    """Ablations of one name are measured in turns, as one table."""
    drain: bool = False
    """The second figure: a fixed set of prompts from empty to empty."""
    warm_limit: int | None = None
    """Where it differs from the preset's."""
    rounds: int | None = None
    """Measured ones, where they differ from the preset's."""

    @property
    def tries(self) -> bool:
        """Whether it tries a factor of over-sampling; all others run at the best one that was tried."""
        return (self.together or "").endswith(OVER_SAMPLING)


@dataclass(frozen=True)
class Preset:
    """Sizes of one benchmark, and how much of it is run."""

    name: str
    plan: Plan
    mean: float
    longest: int
    prompt_tokens: int
    repetitions: int
    shape: str = "tiny"
    """`tiny`: made by a script. Otherwise two checkpoints must be named (`--checkpoints`)."""
    warm_limit: int = 15
    """Rounds after which measuring begins even if the carry still moves (the row is marked)."""
    measured: int = 8
    distributions: tuple[str, ...] = DISTRIBUTIONS
    extreme_short: int = 20
    extreme: int = 100
    """`extreme`: 95 % of the responses have `extreme_short` tokens, 5 % so many times as many."""
    ablations: bool = True
    """Whether they are run, extreme lengths among them."""
    pool: int = 0
    """Tokens of each server's KV pool; 0: what the sizes ask for."""

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
        """KV pool of each server: the partials of several runs that take turns, and every slot at its longest."""
        return self.pool or max(8 * self.plan.slots * int(self.mean), 3 * self.plan.slots * self.context)

    def lengths(self, distribution: str) -> Lengths:
        """A distribution at this size."""
        if distribution.startswith("extreme"):
            return named(distribution, self.extreme_short, 0)
        return named(distribution, self.mean, self.longest)

    def eighth(self, gpu_gb: float = GPU_GB) -> "Preset":
        """Lengths and the model ÷ 8 (Qwen3-0.6B), and as many slots as the pools of two servers on one GPU have room
        for, with a quota as large against the slots as before: all variants in a few minutes."""
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
        """All rows of the preset: the factors for the main table, the main table, then the others by their worth."""
        if self.ablations:
            yield from self._twice(list(self._over_sampling()))
        for repetition in range(self.repetitions):
            yield from (Cell("lognormal", variant, repetition) for variant in MAIN)
        for table in self._tables():
            # One repetition says which factor is best.
            yield from table if table[0].tries else self._twice(table)

    def _twice(self, table: list[Cell]) -> Iterator[Cell]:
        """One time after the other, so that few carries are kept."""
        for repetition in range(min(2, self.repetitions)):
            yield from (replace(cell, repetition=repetition) for cell in table)

    def _tables(self) -> Iterator[list[Cell]]:
        """All but the main one, each after the factors for it."""
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
        """Which factor is the best one from outside, and what ours would be with one."""
        driven = f"{OVER_SAMPLING} demand-driven"
        yield Cell("lognormal", "april-keep", ablation=driven, together=OVER_SAMPLING)
        both = [Cell("lognormal", "outside"), Cell("lognormal", "april-factor")]
        yield from next(self._tries(both, FACTORS))

    def _tries(self, cells: list[Cell], factors: tuple[float, ...] = LIKELY) -> Iterator[list[Cell]]:
        """One table: these cells at each of some factors."""
        table = []
        for factor in factors:
            for cell in cells:
                together = f"{cell.ablation}, {OVER_SAMPLING}" if cell.ablation else OVER_SAMPLING
                plan = replace(cell.plan or self.plan, over_sampling=factor)
                table.append(replace(cell, ablation=f"{together} {factor:g}", plan=plan, together=together))
        yield table

    def _knobs(self) -> Iterator[tuple[str, Plan]]:
        """Ours with one thing changed, beside itself with none."""
        plan = self.plan
        yield "as it is", plan
        yield "max_staleness 5", replace(plan, max_staleness=5)
        for share in (0.5, 0.75):
            yield f"concurrency {round(plan.slots * share)}", replace(plan, concurrency=round(plan.slots * share))
        yield "concurrency auto", replace(plan, concurrency="auto")
        yield "quota by sample", replace(plan, unit="sample")
        yield "cohort", replace(plan, quota_mode="cohort")


class AllVariants(Preset):
    """Every variant, and nothing else."""

    def cells(self) -> Iterator[Cell]:
        for repetition in range(self.repetitions):
            yield from (Cell("lognormal", variant, repetition) for variant in MAIN)
        yield from (Cell("lognormal", variant) for variant in OTHERS)


class FewVariants(Preset):
    """What is waited for, the client outside and ours, and nothing else."""

    def cells(self) -> Iterator[Cell]:
        for table in self._tries([Cell("lognormal", "outside")]):
            yield from table
        yield from (Cell("lognormal", variant, each) for each in range(self.repetitions) for variant in FEW)


class Tiny(Preset):
    """Every variant once, a filter, a drain: CI's smoke test. Its figures mean nothing."""

    def cells(self) -> Iterator[Cell]:
        yield from (Cell("lognormal", variant) for variant in (*MAIN, *OTHERS))
        yield from (Cell("lognormal", variant, ablation="drain", drain=True) for variant in FEW)
        changed = replace(self.plan, filtered=True)
        yield from (Cell("lognormal", v, ablation="filter", plan=changed) for v in (*MAIN, *OTHERS))


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
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}
PRESETS |= {f"{name}/8": PRESETS[name].eighth() for name in ("april", "long", "short-rounds", "dapo")}
