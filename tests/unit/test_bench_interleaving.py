"""bench.rollout: cells, their plans, and how they alternate."""

import asyncio
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.record import Row
from bench.rollout.engine_client import EngineError
from bench.rollout.interleaving import BLOCK, Interleaving, interleaved_groups, kind, shuffled
from bench.rollout.metrics import Block
from bench.rollout.presets import FEW, MAIN, PRESETS, Cell
from bench.rollout.runner import KINDS, Runner, Track
from bench.rollout.testbed import Testbed
from bench.rollout.variant import RoundResult
from tests.unit.round_fixtures import ANY, PLAN, measured


def test_trainer_time_is_a_share_of_rollout_time() -> None:
    testbed = Testbed(ANY, ANY, (Path("a"), Path("b")), PRESETS["tiny"])
    row = {"variant": "async", "ablation": None, "distribution": "lognormal", "seconds": 16.0, "rounds": 8}
    others = [{"distribution": "constant", "seconds": 8.0}, {"variant": "outside"}, {"ablation": "n 8", "seconds": 1.0}]
    for other in ({}, *others):
        testbed.note_time({**row, **other})
    assert testbed.rollout_s == {"lognormal": 2.0, "constant": 1.0}


def test_client_side_variants_run_at_their_best_measured_factor() -> None:
    testbed = Testbed(ANY, ANY, (Path("a"), Path("b")), PRESETS["cpu"])

    def factors(distribution: str, n: int = 4) -> list[float]:
        plan = replace(PRESETS["cpu"].plan, n=n)
        names = ("outside", "outside-retry3s", "async", "april-keep")
        return [testbed.plan(Cell(distribution, name, plan=plan)).over_sampling for name in names]

    assert factors("lognormal") == [1.5] * 4
    for cell in PRESETS["cpu"].cells():
        if cell.tries and cell.plan and cell.variant in ("outside", "async") and cell.plan.n == 4:
            best = {"outside": 2.0, "async": 3.0}[cell.variant]
            reported = {"variant": cell.variant, "distribution": cell.distribution, "ablation": cell.ablation}
            # A variant that only delivers an existing carry is not better than the others.
            grown = -50 if cell.plan.over_sampling > best else 0
            share = {"share_of_limit": 1.9 if grown else 1 - abs(cell.plan.over_sampling - best)}
            share |= {"carry_grown": grown, "delivered_tokens": 100}
            testbed.note({**reported, **share, "together": cell.together, "plan": asdict(cell.plan)})
            assert testbed.plan(cell) == cell.plan, "factors under trial are not replaced"
    assert factors("lognormal") == [2.0, 2.0, 3.0, 1.5]
    assert factors("pareto") == factors("extreme:100") == [2.0, 2.0, 1.5, 1.5]
    assert factors("lognormal", n=8) == [1.5] * 4


def test_presets_name_existing_variants_and_measure_factors_first() -> None:
    for preset in PRESETS.values():
        cells = list(preset.cells())
        assert {cell.variant for cell in cells} <= set(KINDS)
        main = [cell.variant for cell in cells if not cell.tries][: len(MAIN)]
        assert main in (list(MAIN), list(FEW) * 2)
        for number, cell in enumerate(cells):
            late = [_of(other) for other in cells[number:] if other.tries]
            assert cell.tries or _of(cell) not in late, "a factor is tried too late"
        keys = [(c.distribution, c.variant, c.ablation, c.repetition) for c in cells]
        assert len(keys) == len(set(keys))
    assert {cell.variant for cell in PRESETS["tiny"].cells()} == set(KINDS) - {"april-factor"}
    assert PRESETS["april/8"].longest == 2048
    for gpu_gb in (80, 141):
        for name in ("april", "long"):
            short = PRESETS[name].eighth(gpu_gb)
            assert 2 * (5e9 + short.pool * 112 * 1024) < 0.86e9 * gpu_gb
            assert short.pool > 4 * short.plan.slots * (short.mean + short.prompt_tokens)
            assert short.plan.groups * PRESETS[name].plan.slots == pytest.approx(
                PRESETS[name].plan.groups * short.plan.slots, rel=0.3
            )
    assert set(PRESETS["cpu"].lengths("extreme:100").grid) == {20, 2000}
    assert PRESETS["cpu"].context >= 16 + 2000


def _of(cell: Cell) -> tuple[str, str, int]:
    return cell.distribution, cell.variant, cell.plan.n if cell.plan else 4


def test_compared_cells_are_interleaved() -> None:
    cells = list(PRESETS["cpu"].cells())
    groups = interleaved_groups(cells)
    assert sorted(map(str, (cell for group in groups for cell in group))) == sorted(map(str, cells))
    main = [group for group in groups if (group[0].variant, group[0].ablation) == ("synchronous", None)][:5]
    assert [[cell.variant for cell in group] for group in main] == [list(MAIN)] * 5
    assert [group[0].repetition for group in main] == [0, 1, 2, 3, 4]
    for group in groups:
        assert len({(cell.distribution, cell.together or cell.ablation, cell.repetition) for cell in group}) == 1
        assert len({kind(cell) for cell in group}) == 1
    tables = [[(cell.variant, cell.ablation) for cell in group] for group in groups]
    assert next(table for table in tables if table[0] == ("stale-reuse", None))[-2:] == [
        ("async", None),
        ("april-continue", None),
    ]
    # Over-sampling: two ways at five factors and demand-driven admission, and what keeps requests in flight at four.
    assert sorted(map(len, tables))[-3:] == [11, 11, 16]


def test_cells_interleave_with_their_own_kind() -> None:
    names = ("synchronous", "april-keep", "async", "april-continue")
    cells = [Cell("lognormal", name) for name in names]
    assert [len(group) for group in interleaved_groups(cells)] == [2, 2]
    assert [kind(group[0]) for group in interleaved_groups(cells)] == [Interleaving.ROUNDS, Interleaving.BLOCKS]
    mixed = [Cell("trace:a.json", name) for name in KINDS]
    assert sorted(len(group) for group in interleaved_groups(mixed)) == [5, 7]


def test_order_of_variants_changes_between_turns() -> None:
    cells = [Cell("lognormal", "synchronous", repetition) for repetition in range(5)]
    orders = [shuffled(6, cell, turn) for cell in cells for turn in range(8)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    after = Counter(order[order.index(2) + 1] for order in orders if order[-1] != 2)
    assert len(after) == 5
    assert max(after.values()) <= 12, "of forty"
    assert shuffled(6, cells[0], 0) == orders[0] != shuffled(6, replace(cells[0], distribution="pareto"), 0)


class Takings(Runner):
    """A runner whose tracks only note that it was their turn."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        stock: Any = SimpleNamespace(flush=self._flushed)
        preset = replace(PRESETS["tiny"], measured=2 * BLOCK)
        super().__init__(Testbed(stock, stock, (Path("a"), Path("b")), preset, given_limit=1.0), {}, "run", self._kept)

    async def _flushed(self) -> None:
        self.seen.append("flush")

    def _kept(self, _row: Row) -> None:
        raise AssertionError("there are no rows")

    async def _warm(self, cell: Cell, until: float) -> Any:
        async def block(rounds: int) -> None:
            assert rounds == BLOCK
            self.seen.append(cell.variant)

        async def keep_up(rounds: int) -> None:
            assert rounds == 0

        return SimpleNamespace(block=block, carried=[], keep_up=keep_up)

    def _row(self, *_: Any) -> None:
        pass

    async def _finish(self, track: Any) -> None:
        pass


def test_prefix_cache_is_flushed_between_blocks() -> None:
    runner = Takings()
    left_out = asyncio.run(runner.run([Cell("lognormal", "async"), Cell("lognormal", "april-continue")], float("inf")))
    assert left_out == 0
    assert runner.seen == ["flush", "async", "flush", "april-continue"] * 2


@pytest.mark.parametrize(("rounds", "rounds_before"), [(8, list(range(8))), (24, list(range(0, 24, 3)))])
def test_number_of_probes_is_bounded(rounds: int, rounds_before: list[int]) -> None:
    runner, seen = Takings(), []
    cell = Cell("extreme:100", "april-keep", ablation="drain", drain=True, rounds=rounds)
    block = Block(0, [])

    async def turn(_: float) -> Any:
        seen.append("round")
        return SimpleNamespace(round=SimpleNamespace(groups=[None] * PLAN.groups))

    async def measure() -> None:
        seen.append("probe")

    async def rest() -> None:
        pass

    variant = SimpleNamespace(rest=rest)
    track: Any = SimpleNamespace(
        cell=cell, rounds=rounds, round=turn, trainer_s=0.0, plan=PLAN, variant=variant, fixed=lambda: block
    )
    asyncio.run(runner._round_by_round([track], [[]], cast(Any, SimpleNamespace(measure=measure)), float("inf")))
    assert len(block.rounds) == seen.count("round") == rounds
    assert [seen[:i].count("round") for i, what in enumerate(seen) if what == "probe"] == rounds_before


def test_variants_of_a_table_are_measured_at_the_same_position_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant whose carry needs longer to become steady has used more prompts; a later check may detect that."""
    testbed = Testbed(ANY, ANY, (Path("a"), Path("b")), PRESETS["cpu"], given_limit=1.0)
    runner = Runner(testbed, {}, "run", lambda row: None)
    growing = {"synchronous": [0] * 99, "outside": [0, 20, 40] + [50] * 99, "april-keep": [1, 2] * 99}

    async def turn(track: Track, _trainer_s: float = 0.0) -> Any:
        track.carried.append(growing[track.cell.variant][len(track.carried)])
        return measured(RoundResult(0, []))

    async def rest(_: object) -> None:
        pass

    async def stop(tracks: list[Track], *_: object) -> None:
        places.append({track.cell.variant: (len(track.carried), track.warm_rounds, track.steady) for track in tracks})
        last.append(tracks[-1])
        raise EngineError("GET /", 503, b"{}")

    last: list[Track] = []
    places: list[dict[str, tuple[int, int, bool | None]]] = []
    monkeypatch.setattr(Track, "round", turn)
    monkeypatch.setattr(runner, "_round_by_round", stop)
    for name in growing:
        monkeypatch.setattr(KINDS[name], "rest", rest, raising=False)
    with pytest.raises(EngineError):
        asyncio.run(runner._measure([Cell("lognormal", name) for name in growing], [False] * 3, float("inf")))
    assert places == [{"synchronous": (15, 3, True), "outside": (15, 8, True), "april-keep": (15, 15, False)}]
    late = last[-1]
    late.carried += [2] * 6
    asyncio.run(late.keep_up(21))
    assert (len(late.carried), late.steady) == (21, True)


def test_only_a_refused_field_skips_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that this version of the server does not know has no row, and the others do; a fault ends the run."""
    runner, usual = Takings(), Takings._warm
    cells = [Cell("lognormal", "async"), Cell("lognormal", "april-continue")]

    async def run(status: int) -> None:
        async def refuse(cell: Cell, until: float) -> Any:
            if cell.variant == "april-continue":
                raise EngineError("POST /april/rollout", status, b"{}")
            return await usual(runner, cell, until)

        monkeypatch.setattr(runner, "_warmed", refuse)
        monkeypatch.setattr(runner, "_warm", lambda *given: Runner._warm(runner, *given))
        await runner.run(cells, float("inf"))

    asyncio.run(run(400))
    assert runner.seen == ["flush", "async"] * 2
    with pytest.raises(EngineError, match="POST /april/rollout: 503"):
        asyncio.run(run(503))
