"""Cells to rows: repetitions in turn, the budget, and what a variant needs before it may be measured."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.record import Row
from bench.rollout import april, inflight, stock
from bench.rollout.engine import Engine, EngineError
from bench.rollout.figures import IdentityError, Measured, between, figures
from bench.rollout.lengths import Lengths
from bench.rollout.limit import decode_rate
from bench.rollout.presets import Cell, Preset
from bench.rollout.steady import is_steady
from bench.rollout.variant import Plan, Variant, lost
from bench.rollout.workload import Stream

KINDS: dict[str, type[Variant]] = {
    kind.name: kind
    for kind in (
        *(stock.Synchronous, stock.Outside, stock.OutsideRetry, stock.StaleReuse),
        *(inflight.PauseRetract, inflight.PauseInPlace, inflight.Asynchronous),
        *(april.Keep, april.Recompute, april.Auto, april.Continue, april.Factor),
    )
}
STEP_BATCHES = (1, 8, 32)
IN_TURNS = ("synchronous", "outside", "outside-retry3s", "april-keep", "april-recompute", "april-auto", "april-factor")
"""Between two rounds of these nothing runs, and their next push leaves no prefix to be found: their rounds are measured
in turns, round by round, and a machine that becomes faster or slower meanwhile does so for all of them."""


@dataclass
class Bed:
    """Where cells run: two servers, two checkpoints, and what was measured of the machine."""

    stock: Engine
    april: Engine
    checkpoints: tuple[Path, Path]
    preset: Preset
    seed: int = 0
    given_limit: float | None = None
    """Full-batch rate in tokens/s, where it is not to be measured."""
    steps_ms: dict[str, float] = field(default_factory=dict)
    synchronous_s: float | None = None
    """Mean seconds of a synchronous round: what a trainer's time is a share of."""

    def engine(self, variant: str) -> Engine:
        """Ours for our variants, the stock one for the others."""
        return self.april if variant.startswith("april") else self.stock

    def lengths(self, distribution: str) -> Lengths:
        """A distribution at the preset's size."""
        return self.preset.lengths(distribution)

    async def limit(self, distribution: str) -> float:
        """Full-batch rate in tokens/s, now, on the stock server: the ruler of both. Machines change within a minute."""
        if self.given_limit is not None:
            return self.given_limit
        slots, tokens = self.preset.plan.slots, self.preset.prompt_tokens
        length = max(40, min(self.preset.longest, round(self.lengths(distribution).running_mean)))
        rate, step = await decode_rate(self.stock, slots, length, tokens)
        if not self.steps_ms:
            for batch in STEP_BATCHES:
                if batch < slots:
                    _, took = await decode_rate(self.stock, batch, length, tokens)
                    self.steps_ms[str(batch)] = round(1e3 * took, 3)
            self.steps_ms[str(slots)] = round(1e3 * step, 3)
        return rate


class Track:
    """One variant with its stream and its carry: it rests while others run, and goes on where it was."""

    def __init__(self, bed: Bed, cell: Cell) -> None:
        self.bed, self.cell = bed, cell
        self.plan: Plan = cell.plan or bed.preset.plan
        self.engine = bed.engine(cell.variant)
        self.lengths = bed.lengths(cell.distribution)
        stream = Stream(bed.seed, self.lengths, self.plan.n, bed.preset.prompt_tokens)
        self.variant: Variant = KINDS[cell.variant](self.engine, self.plan, stream)
        self.carried: list[int] = []
        self._checkpoints = itertools.cycle(bed.checkpoints)
        self.began = 0.0
        """When the clock of its last round started, in seconds since the epoch."""
        self.steady: bool | None = None
        """None: not warmed up yet."""
        self._drawn = 0
        """Decoded tokens of this variant less the delivered ones: the carry of who cannot know it."""

    async def round(self, trainer_s: float = 0.0) -> Measured:
        """A push, a round, and what a trainer does with it. The clock stands while the counters settle, except for
        what never stops."""
        ahead = isinstance(self.variant, (inflight.Asynchronous, april.Continue))
        before = await (self.engine.counters() if ahead else self.engine.settled())
        self.began, start = time.time(), time.perf_counter()
        await self.variant.push(next(self._checkpoints))
        done = await self.variant.round()
        if trainer_s:
            await asyncio.sleep(trainer_s)
        seconds = time.perf_counter() - start
        after = await (self.engine.counters() if ahead else self.engine.settled())
        measured = between(before, after, done, seconds)
        self._note(measured)
        return measured

    def _note(self, measured: Measured) -> None:
        done = measured.round
        delivered = sum(sum(group.lengths) - len(group.lengths) for group in done.groups)
        self._drawn += measured.decoded + (done.legs if done.generated is None else 0) - delivered
        if done.carry is None:
            done.carry = max(0, self._drawn)
        self.carried.append(done.carry)

    async def warm(self) -> bool:
        """Rounds until the carry is steady, and a rest; False if the limit came first."""
        while len(self.carried) < self.bed.preset.warm_limit:
            await self.round(self.trainer_s)
            if is_steady(self.carried):
                break
        await self.variant.rest()
        return is_steady(self.carried)

    @property
    def trainer_s(self) -> float:
        """Seconds that a trainer takes in each round."""
        return self.cell.trainer * (self.bed.synchronous_s or 0.0)

    async def emptied(self) -> tuple[int, list[Measured]]:
        """A fixed set of prompts from empty to empty, as one measured piece."""
        rounds = [await self.round() for _ in range(self.bed.preset.measured)]
        before = await self.engine.settled()
        start = time.perf_counter()
        last = await self.variant.drain()
        seconds = time.perf_counter() - start
        rounds.append(between(before, await self.engine.settled(), last, seconds))
        last.carry = 0
        return 0, rounds


class Runner:
    """Runs cells one after the other; tracks live as long as a later cell of theirs is to come."""

    def __init__(self, bed: Bed, facts: Row, run_id: str, keep: Callable[[Row], None]) -> None:
        self._bed, self._facts, self._run_id, self._keep = bed, facts, run_id, keep
        self._tracks: dict[tuple[str, str, str | None], Track] = {}

    async def run(self, cells: list[Cell], until: float) -> int:
        """Rows of the cells, as many as fit before the monotonic clock's `until`; returns how many were left out."""
        slowest, done = 0.0, 0
        for group in in_turns(cells):
            if time.monotonic() + slowest > until:
                return len(cells) - done
            start = time.monotonic()
            done += len(group)
            last = [not any(_key(later) == _key(cell) for later in cells[done:]) for cell in group]
            try:
                await self._measure(group, last)
            except IdentityError as error:
                raise IdentityError(f"{group}: {error}") from error
            except EngineError as refusal:
                # A field that this version of the server does not have: the other rows are still worth having.
                for cell in group:
                    name = f"{cell.distribution} {cell.variant} {cell.ablation or ''}"
                    print(f"{name} was not run: {refusal}", flush=True)
                    self._tracks.pop(_key(cell), None)
            slowest = max(0.8 * slowest, time.monotonic() - start)
        return 0

    async def _measure(self, cells: list[Cell], last: list[bool]) -> None:
        """One row for each of the cells, which are measured in turns."""
        tracks = [await self._warm(cell) for cell in cells]
        limits = [await self._bed.limit(cells[0].distribution)]
        if cells[0].drain:
            parts = [await track.emptied() for track in tracks]
        else:
            for track in tracks:
                await track.round(track.trainer_s)  # the one after a rest is not measured
            carries = [track.carried[-1] for track in tracks]
            taken: list[list[Measured]] = [[] for _ in tracks]
            for number in range(self._bed.preset.measured):
                if number and len(tracks) > 1:
                    limits.append(await self._bed.limit(cells[0].distribution))
                for track, rounds in zip(tracks, taken, strict=True):
                    rounds.append(await track.round(track.trainer_s))
            for track in tracks:
                await track.variant.rest()
            parts = list(zip(carries, taken, strict=True))
        limits.append(await self._bed.limit(cells[0].distribution))
        for track, (carry, rounds), is_last in zip(tracks, parts, last, strict=True):
            await self._row(track, carry, rounds, limits, last=is_last)

    async def _warm(self, cell: Cell) -> Track:
        if cell.trainer and self._bed.synchronous_s is None:
            self._bed.synchronous_s = await self._synchronous(cell)
        track = self._tracks.setdefault(_key(cell), Track(self._bed, cell))
        track.cell = cell
        if track.steady is None:
            track.steady = cell.drain or await track.warm()
        return track

    async def _row(self, track: Track, carry: int, rounds: list[Measured], limits: list[float], *, last: bool) -> None:
        cell = track.cell
        row = {
            "bench": "rollout",
            "run_id": self._run_id,
            "preset": self._bed.preset.name,
            **self._facts,
            "distribution": cell.distribution,
            "variant": cell.variant,
            "ablation": cell.ablation,
            "repetition": cell.repetition,
            "steady": track.steady,
            "server": "april" if track.engine.patched else "stock",
            "plan": asdict(track.plan),
            "trainer_s": track.trainer_s,
            "step_ms_by_batch": self._bed.steps_ms,
            **figures(rounds, carry, track.plan, track.lengths, limits),
            "carry_source": "counter" if rounds[0].round.generated is None else "client",
            "samples_lost": None,
            "samples_twice": None,
        }
        if cell.variant == "synchronous" and cell.ablation is None:
            self._bed.synchronous_s = row["seconds"] / row["rounds"]
        if last:
            # Only now can it be said of every sample where it went.
            if not cell.drain:
                await track.variant.drain()
            row["samples_lost"], row["samples_twice"] = lost(track.variant, track.plan.n)
            del self._tracks[_key(cell)]
        self._keep(row)

    async def _synchronous(self, cell: Cell) -> float:
        track = Track(self._bed, Cell(cell.distribution, "synchronous"))
        return sum([(await track.round()).seconds for _ in range(3)]) / 3


def in_turns(cells: list[Cell]) -> list[list[Cell]]:
    """The cells in their order, those together whose rounds can be measured in turns."""
    groups: list[list[Cell]] = []
    for cell in cells:
        before = groups[-1][-1] if groups else None
        alike = before is not None and _table(before) == _table(cell) and not cell.drain
        if alike and before is not None and before.variant in IN_TURNS and cell.variant in IN_TURNS:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    return groups


def _table(cell: Cell) -> tuple[str, str | None, int, float]:
    return cell.distribution, cell.ablation, cell.repetition, cell.trainer


def _key(cell: Cell) -> tuple[str, str, str | None]:
    return cell.distribution, cell.variant, cell.ablation
