"""Cells to rows: repetitions in turn, the budget, and what a variant needs before it may be measured."""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from bench.record import Row
from bench.rollout import april, baselines, in_flight
from bench.rollout.engine_client import Counters, EngineError
from bench.rollout.interleaving import BLOCK, Interleaving, in_turns, kind, shuffled
from bench.rollout.metrics import Block, IdentityError, Measured, between, figures, grown
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


LOOKS = 8
"""At the machine between the rounds of a row, at most; one more follows them."""


class Track:
    """One variant with its stream and its carry. It rests while other variants run and then continues."""

    def __init__(self, bed: Testbed, cell: Cell) -> None:
        self.bed, self.cell = bed, cell
        self.plan = bed.plan(cell)
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
        self.warm_rounds = 0
        self._drawn = 0
        """Drawn tokens of this variant less the delivered ones: the carry of who cannot know it."""
        self._last, self._last_legs = RoundResult(0, []), 0

    async def round(self, trainer_s: float = 0.0) -> Measured:
        """A push, a round, and what a trainer does with it. The clock is stopped while connections are opened and the
        counters settle, except for what never stops: there it runs from one look at the counters to the other's end."""
        ahead = isinstance(self.variant, (in_flight.Asynchronous, april.AprilContinue))
        before = None if ahead else await self._at_rest()
        self.began, start = time.time(), time.perf_counter()
        before = before or await self.engine.counters()
        await self.variant.push(next(self._checkpoints))
        done = await self.variant.round()
        if trainer_s:
            await asyncio.sleep(trainer_s)
        after = await self.engine.counters() if ahead else None
        seconds = time.perf_counter() - start
        measured = between(before, after or await self.engine.settled(), done, seconds)
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
        """Rounds until the carry is steady, and a rest; False if the limit, or the monotonic clock's `until`, came
        first."""
        while time.monotonic() < until and len(self.carried) < (self.cell.warm_limit or self.bed.preset.warm_limit):
            await self.round(self.trainer_s)
            if is_steady(self.carried):
                break
        await self.variant.rest()
        self.warm_rounds = len(self.carried)
        return is_steady(self.carried)

    async def keep_up(self, rounds: int) -> None:
        """More rounds, until it has had so many, and a rest."""
        if len(self.carried) < rounds:
            while len(self.carried) < rounds:
                await self.round(self.trainer_s)
            await self.variant.rest()
        self.steady = self.steady or is_steady(self.carried)

    @property
    def rounds(self) -> int:
        """That are measured."""
        return self.cell.rounds or self.bed.preset.measured

    @property
    def trainer_s(self) -> float:
        """Seconds that a trainer takes in each round."""
        return self.cell.trainer and self.cell.trainer * self.bed.rollout_s[self.cell.distribution]

    async def block(self, rounds: int) -> Block:
        """One round that is not measured, because others ran before it, and so many that are; then a rest, unless
        there are none."""
        await self.round(self.trainer_s)
        done = Block(self.carried[-1], [await self.round(self.trainer_s) for _ in range(rounds)])
        if rounds:
            await self.variant.rest()
            if isinstance(self.variant, in_flight.InFlight):
                # Now the client has all there is: what the counter missed is made good.
                self._drawn, self._last_legs = self.variant.held_tokens, self._last.legs
        return done

    def fixed(self) -> Block:
        """No rounds yet, and a fixed set of prompts: the quotas of those to come are all that there is."""
        stream = self.variant.stream
        stream.ends_after = stream.taken + self.rounds * self.plan.groups
        return Block(0, [])


class Runner:
    """Runs cells one after the other. `facts`: what every row says of the run."""

    def __init__(self, bed: Testbed, facts: Row, run_id: str, keep: Callable[[Row], None]) -> None:
        self._bed, self._facts, self._run_id, self._keep = bed, facts, run_id, keep
        self._tracks: dict[tuple[str, str, str | None], Track] = {}
        """Until the last cell that uses them."""

    async def run(self, cells: list[Cell], until: float) -> int:
        """Rows of the cells, as many as fit before the monotonic clock's `until`; returns how many were left out."""
        slowest, done = 0.0, 0
        groups = in_turns(cells)
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
        """One row for each of the cells, which are measured in turns: rounds of fewer than were asked for if the time
        is up before (at least two)."""
        warmed = [(await self._warm(cell, until), is_last) for cell, is_last in zip(cells, last, strict=True)]
        tracks = [track for track, _ in warmed if track]
        if not tracks:
            return
        if not cells[0].drain:
            # All have come as far in the same stream, so that what is measured are about the same prompts.
            most = max(len(track.carried) for track in tracks)
            for track in tracks:
                await track.keep_up(most)
        ruler = MachineProbe(self._bed, cells[0])
        blocks: list[list[Block]] = [[] for _ in tracks]
        if kind(cells[0]) is Interleaving.ROUNDS:
            await self._round_by_round(tracks, blocks, ruler, until)
        else:
            for turn in range(-(-self._bed.preset.measured // BLOCK)):
                if turn and time.monotonic() > until:
                    break
                for track, mine in zip(tracks, blocks, strict=True):
                    # Nobody's turn is to pay for what others left in the tree, nor is the look.
                    await self._bed.stock.flush()
                    await ruler.look()
                    mine.append(await track.block(min(BLOCK, self._bed.preset.measured)))
        await ruler.look()
        for track, mine in zip(tracks, blocks, strict=True):
            self._row(track, mine, ruler)
        # All rows are kept before the first of these: what fails now takes none of them away.
        for track, is_last in warmed:
            if track and is_last:
                await self._finish(track)

    async def _round_by_round(
        self, tracks: list[Track], blocks: list[list[Block]], ruler: MachineProbe, until: float
    ) -> None:
        for track, mine in zip(tracks, blocks, strict=True):
            mine.append(track.fixed() if track.cell.drain else await track.block(0))
        count = tracks[0].rounds
        for turn in range(count):
            if turn >= 2 and time.monotonic() > until and not tracks[0].cell.drain:
                break
            if turn % -(-count // LOOKS) == 0:
                await ruler.look()
            for i in shuffled(len(tracks), tracks[0].cell, turn):
                blocks[i][0].rounds.append(await tracks[i].round(tracks[i].trainer_s))
        for track, (block,) in zip(tracks, blocks, strict=True):
            await track.variant.rest()
            groups = sum(len(measured.round.groups) for measured in block.rounds)
            if track.cell.drain and groups != count * track.plan.groups:
                raise IdentityError(f"{groups} groups of {count * track.plan.groups} were delivered")

    async def _warm(self, cell: Cell, until: float) -> Track | None:
        """The cell's track, warm; None if the server lacks a field that it needs: the others are still worth having."""
        try:
            return await self._warmed(cell, until)
        except EngineError as refusal:
            if refusal.status != 400:
                raise
            self._tracks.pop(_key(cell), None)
            print(f"{cell.distribution} {cell.variant} {cell.ablation or ''} was not run: {refusal}", flush=True)
            return None

    async def _warmed(self, cell: Cell, until: float) -> Track:
        if cell.trainer and cell.distribution not in self._bed.rollout_s:
            self._bed.rollout_s[cell.distribution] = await self._rollout_s(cell)
        track = self._tracks.setdefault(_key(cell), Track(self._bed, cell))
        track.cell = cell
        if track.steady is None:
            track.steady = cell.drain or await track.warm(until)
            name = f"{cell.distribution} {cell.variant} {cell.ablation or ''}".rstrip()
            print(f"{name}: {'' if track.steady else 'not '}steady after {track.warm_rounds} rounds", flush=True)
        return track

    def _row(self, track: Track, blocks: Sequence[Block], ruler: MachineProbe) -> None:
        cell = track.cell
        row = {
            "bench": "rollout",
            "run_id": self._run_id,
            "preset": self._bed.preset.name,
            **self._facts,
            "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "distribution": cell.distribution,
            "variant": cell.variant,
            "ablation": cell.ablation,
            "together": cell.together,
            "repetition": cell.repetition,
            "steady": track.steady and (cell.drain or _is_level(blocks)),
            "warm_rounds": track.warm_rounds,
            "server": "april" if track.engine.patched else "stock",
            "plan": asdict(track.plan),
            "trainer_s": track.trainer_s,
            "step_ms_by_batch": ruler.observed.step_ms(),
            "costs": ruler.costs(),
            **figures(blocks, track.plan, track.lengths, ruler.limits),
            "carry_source": "counter" if blocks[0].rounds[0].round.generated is None else "client",
        }
        row["samples_lost"], row["samples_twice"] = lost(track.variant, track.plan.n)
        self._bed.note(row)
        self._bed.note_time(row)
        self._keep(row)

    async def _finish(self, track: Track) -> None:
        """After its last row every sample must come, and not only be said to be there."""
        del self._tracks[_key(track.cell)]
        if not track.cell.drain:
            await track.variant.drain()
        if any(counts := lost(track.variant, track.plan.n)):
            raise IdentityError(f"{track.cell}: {counts[0]} samples were lost, {counts[1]} came twice")

    async def _rollout_s(self, cell: Cell) -> float:
        track = Track(self._bed, Cell(cell.distribution, "async"))
        await track.warm()
        took = [measured.seconds for measured in (await track.block(BLOCK)).rounds]
        await track.variant.drain()
        return sum(took) / len(took)


def _key(cell: Cell) -> tuple[str, str, str | None]:
    return cell.distribution, cell.variant, cell.ablation


def _is_level(blocks: Sequence[Block]) -> bool:
    delivered = sum(measured.round.tokens for block in blocks for measured in block.rounds)
    return carry_is_level(sum(map(grown, blocks)), delivered)
