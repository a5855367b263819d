"""Cells to rows: repetitions, the time budget, and warm-up."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from bench.record import Row
from bench.rollout import april, baselines, in_flight
from bench.rollout.engine_client import Counters, EngineError
from bench.rollout.interleaving import BLOCK, Interleaving, interleaved_groups, kind, shuffled
from bench.rollout.metrics import Block, IdentityError, Measured, between, grown, round_metrics
from bench.rollout.presets import Cell
from bench.rollout.steady_state import carry_is_level, is_steady
from bench.rollout.testbed import MachineProbe, Testbed
from bench.rollout.variant import RoundResult, Variant, lost
from bench.rollout.workload import Stream

KINDS: dict[str, type[Variant]] = {
    kind.name: kind
    for kind in (
        *(baselines.Synchronous, baselines.Outside, baselines.OutsideRetry, baselines.StaleReuse),
        *(in_flight.PauseRetract, in_flight.PauseInPlace, in_flight.Asynchronous),
        *(april.AprilKeep, april.AprilRecompute, april.AprilAuto, april.AprilContinue, april.AprilFactor),
    )
}


PROBES = 8
"""Largest number of machine probes between the rounds of a row; one more follows the last round."""


class Track:
    """One variant with its prompts and its carry. It rests while other variants run."""

    def __init__(self, testbed: Testbed, cell: Cell) -> None:
        self.testbed, self.cell = testbed, cell
        self.plan = testbed.plan(cell)
        self.engine = testbed.engine(cell.variant)
        self.lengths = testbed.lengths(cell.distribution)
        stream = Stream(testbed.seed, self.lengths, self.plan.n, testbed.preset.prompt_tokens)
        self.variant: Variant = KINDS[cell.variant](self.engine, self.plan, stream)
        self.carried: list[int] = []
        self._checkpoints = itertools.cycle(testbed.checkpoints)
        self.began = 0.0
        """Start of the last round, in seconds since the epoch."""
        self.steady: bool | None = None
        """Whether the carry became steady; None before warm-up."""
        self.warm_rounds = 0
        self._drawn = 0
        """Drawn minus delivered tokens: the carry of variants that cannot observe it."""
        self._last, self._last_legs = RoundResult(0, []), 0

    async def round(self, trainer_s: float = 0.0) -> Measured:
        """A push, a round, and `trainer_s` seconds of training. Opening connections and waiting for the counters is not
        timed, except for variants that never stop: their time runs from one read of the counters to the next."""
        ahead = isinstance(self.variant, (in_flight.Asynchronous, april.AprilContinue))
        before = None if ahead else await self._at_rest()
        self.began, start = time.time(), time.perf_counter()
        before = before or await self.engine.counters()
        await self.variant.push(next(self._checkpoints))
        push_s = time.perf_counter() - start
        done = await self.variant.round()
        if trainer_s:
            await asyncio.sleep(trainer_s)
        after = await self.engine.counters() if ahead else None
        seconds = time.perf_counter() - start
        measured = between(before, after or await self.engine.settled(), done, seconds, push_s)
        self._note(measured)
        return measured

    async def _at_rest(self) -> Counters:
        await self.engine.connect(math.ceil(self.plan.over_sampling * self.plan.groups))
        return await self.engine.settled()

    def _note(self, measured: Measured) -> None:
        done = measured.round
        # Requests that ended between the rounds have reported their legs since.
        late, self._last, self._last_legs = self._last.legs - self._last_legs, done, done.legs
        self._drawn += measured.decoded + done.legs + late - done.wasted
        self._drawn -= sum(sum(group.lengths) for group in done.groups)
        if done.carry is None:
            done.carry = max(0, self._drawn)
        self.carried.append(done.carry)

    async def warm(self, until: float = math.inf) -> bool:
        """Run rounds until the carry is steady, then rest. Returns False if the warm-up limit or the time `until`
        (monotonic) came first."""
        while time.monotonic() < until and len(self.carried) < (self.cell.warm_limit or self.testbed.preset.warm_limit):
            await self.round(self.trainer_s)
            if is_steady(self.carried):
                break
        await self.variant.rest()
        self.warm_rounds = len(self.carried)
        return is_steady(self.carried)

    async def keep_up(self, rounds: int) -> None:
        """Run more rounds until this many have run, then rest."""
        if len(self.carried) < rounds:
            while len(self.carried) < rounds:
                await self.round(self.trainer_s)
            await self.variant.rest()
        self.steady = self.steady or is_steady(self.carried)

    @property
    def rounds(self) -> int:
        """Number of measured rounds."""
        return self.cell.rounds or self.testbed.preset.measured

    @property
    def trainer_s(self) -> float:
        """Seconds of training per round."""
        return self.cell.trainer and self.cell.trainer * self.testbed.rollout_s[self.cell.distribution]

    async def block(self, rounds: int) -> Block:
        """One unmeasured round, because other variants ran before, then `rounds` measured ones and a rest."""
        await self.round(self.trainer_s)
        done = Block(self.carried[-1], [await self.round(self.trainer_s) for _ in range(rounds)])
        if rounds:
            await self.variant.rest()
            if isinstance(self.variant, in_flight.InFlight):
                # The client now has every token, so this corrects for tokens that the counter missed.
                self._drawn, self._last_legs = self.variant.held_tokens, self._last.legs
        return done

    def fixed(self) -> Block:
        """An empty block with a fixed set of prompts, enough for its rounds."""
        stream = self.variant.stream
        stream.ends_after = stream.taken + self.rounds * self.plan.groups
        return Block(0, [])


class Runner:
    """Runs cells one after the other. `common`: fields that every row of the run has."""

    def __init__(self, testbed: Testbed, common: Row, run_id: str, keep: Callable[[Row], None]) -> None:
        self._testbed, self._common, self._run_id, self._keep = testbed, common, run_id, keep
        self._tracks: dict[tuple[str, str, str | None], Track] = {}
        """Tracks in use, removed after the last cell that needs them."""

    async def run(self, cells: list[Cell], until: float) -> int:
        """Measure cells until the time `until` (monotonic); returns the number of cells left out."""
        slowest, done = 0.0, 0
        groups = interleaved_groups(cells)
        cells = [cell for group in groups for cell in group]
        for group in groups:
            if time.monotonic() + slowest > until:
                return len(cells) - done
            start = time.monotonic()
            done += len(group)
            last = [not any(_key(later) == _key(cell) for later in cells[done:]) for cell in group]
            try:
                await self._measure(group, last, until)
            except IdentityError as error:
                raise IdentityError(f"{group}: {error}") from error
            slowest = max(0.8 * slowest, time.monotonic() - start)
        return 0

    async def _measure(self, cells: list[Cell], last: list[bool], until: float) -> None:
        """Measure alternating cells, one row each; with fewer rounds (at least two) if the time is up."""
        warmed = [(await self._warm(cell, until), is_last) for cell, is_last in zip(cells, last, strict=True)]
        tracks = [track for track, _ in warmed if track]
        if not tracks:
            return
        if not cells[0].drain:
            # Advance all variants to the same position in the stream, so that they are measured on similar prompts.
            most = max(len(track.carried) for track in tracks)
            for track in tracks:
                await track.keep_up(most)
        machine = MachineProbe(self._testbed, cells[0])
        blocks: list[list[Block]] = [[] for _ in tracks]
        if kind(cells[0]) is Interleaving.ROUNDS:
            await self._round_by_round(tracks, blocks, machine, until)
        else:
            for turn in range(-(-self._testbed.preset.measured // BLOCK)):
                if turn and time.monotonic() > until:
                    break
                for track, mine in zip(tracks, blocks, strict=True):
                    # Prefixes that other variants left in the tree would slow this turn and the probe.
                    await self._testbed.stock.flush()
                    await machine.measure()
                    mine.append(await track.block(min(BLOCK, self._testbed.preset.measured)))
        await machine.measure()
        for track, mine in zip(tracks, blocks, strict=True):
            self._row(track, mine, machine)
        # All rows are stored before the first drain, so that a failure in a drain loses no row.
        for finished, is_last in warmed:
            if finished and is_last:
                await self._finish(finished)

    async def _round_by_round(
        self, tracks: list[Track], blocks: list[list[Block]], machine: MachineProbe, until: float
    ) -> None:
        for track, mine in zip(tracks, blocks, strict=True):
            mine.append(track.fixed() if track.cell.drain else await track.block(0))
        count = tracks[0].rounds
        for turn in range(count):
            if turn >= 2 and time.monotonic() > until and not tracks[0].cell.drain:
                break
            if turn % -(-count // PROBES) == 0:
                await machine.measure()
            for i in shuffled(len(tracks), tracks[0].cell, turn):
                blocks[i][0].rounds.append(await tracks[i].round(tracks[i].trainer_s))
        for track, (block,) in zip(tracks, blocks, strict=True):
            await track.variant.rest()
            groups = sum(len(measured.round.groups) for measured in block.rounds)
            if track.cell.drain and groups != count * track.plan.groups:
                raise IdentityError(f"{groups} groups of {count * track.plan.groups} were delivered")

    async def _warm(self, cell: Cell, until: float) -> Track | None:
        """The warmed-up track of a cell, or None if the server does not support a field that it needs."""
        try:
            return await self._warmed(cell, until)
        except EngineError as refusal:
            if refusal.status != 400:
                raise
            self._tracks.pop(_key(cell), None)
            print(f"{cell.distribution} {cell.variant} {cell.ablation or ''} was not run: {refusal}", flush=True)
            return None

    async def _warmed(self, cell: Cell, until: float) -> Track:
        if cell.trainer and cell.distribution not in self._testbed.rollout_s:
            self._testbed.rollout_s[cell.distribution] = await self._rollout_s(cell)
        track = self._tracks.setdefault(_key(cell), Track(self._testbed, cell))
        track.cell = cell
        if track.steady is None:
            track.steady = cell.drain or await track.warm(until)
            name = f"{cell.distribution} {cell.variant} {cell.ablation or ''}".rstrip()
            print(f"{name}: {'' if track.steady else 'not '}steady after {track.warm_rounds} rounds", flush=True)
        return track

    def _row(self, track: Track, blocks: Sequence[Block], machine: MachineProbe) -> None:
        cell = track.cell
        row = {
            "bench": "rollout",
            "run_id": self._run_id,
            "preset": self._testbed.preset.name,
            **self._common,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "distribution": cell.distribution,
            "variant": cell.variant,
            "ablation": cell.ablation,
            "together": cell.together,
            "repetition": cell.repetition,
            "steady": track.steady and (cell.drain or _blocks_level(blocks)),
            "warm_rounds": track.warm_rounds,
            "server": "april" if track.engine.patched else "stock",
            "plan": asdict(track.plan),
            "trainer_s": track.trainer_s,
            "step_ms_by_batch": machine.observed.step_ms(),
            "costs": machine.costs(),
            **round_metrics(blocks, track.plan, track.lengths, machine.limits),
            "carry_source": "counter" if blocks[0].rounds[0].round.generated is None else "client",
        }
        row["samples_lost"], row["samples_twice"] = lost(track.variant, track.plan.n)
        self._testbed.note(row)
        self._testbed.note_time(row)
        self._keep(row)

    async def _finish(self, track: Track) -> None:
        """After the last row of a variant, drain it: every remaining sample must be delivered."""
        del self._tracks[_key(track.cell)]
        if not track.cell.drain:
            await track.variant.drain()
        if any(counts := lost(track.variant, track.plan.n)):
            raise IdentityError(f"{track.cell}: {counts[0]} samples were lost, {counts[1]} were delivered twice")

    async def _rollout_s(self, cell: Cell) -> float:
        track = Track(self._testbed, Cell(cell.distribution, "async"))
        await track.warm()
        took = [measured.seconds for measured in (await track.block(BLOCK)).rounds]
        await track.variant.drain()
        return sum(took) / len(took)


def _key(cell: Cell) -> tuple[str, str, str | None]:
    return cell.distribution, cell.variant, cell.ablation


def _blocks_level(blocks: Sequence[Block]) -> bool:
    delivered = sum(measured.round.tokens for block in blocks for measured in block.rounds)
    return carry_is_level(sum(map(grown, blocks)), delivered)
