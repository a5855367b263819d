"""bench.rollout's arithmetic: lengths, the steady state, the identity, rows, cells."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench.record import Row
from bench.rollout.bed import Bed
from bench.rollout.engine import Counters, EngineError
from bench.rollout.figures import Block, IdentityError, Measured, between, check_identity, figures, ratios
from bench.rollout.inflight import PauseInPlace
from bench.rollout.lengths import SIGMA, named
from bench.rollout.limit import Point, of_snapshots
from bench.rollout.presets import MAIN, PRESETS, Cell
from bench.rollout.run import KINDS, Runner, Track
from bench.rollout.steady import is_level, is_steady
from bench.rollout.stock import Leg, Open, Outside, OutsideRetry
from bench.rollout.turns import BLOCK, Turns, in_turns, kind, shuffled
from bench.rollout.variant import Group, Plan, Round
from bench.rollout.workload import REJECTED_SHARE, Prompt, Stream

ANY: Any = None
PLAN = Plan(slots=4, groups=1, n=2)


@pytest.mark.parametrize("name", ["lognormal", "pareto", "uniform", "constant"])
def test_a_distribution_has_the_mean_that_was_asked_for(name: str) -> None:
    lengths = named(name, 64, 1024)
    assert lengths.mean == pytest.approx(64, rel=0.03)
    assert 1 <= lengths.grid[0] <= lengths.grid[-1] <= 1024
    rng = random.Random(1)
    sample = [lengths.draw(rng) for _ in range(4000)]
    assert lengths.distance(sample) < 0.04
    assert lengths.distance([length * 2 for length in sample]) > 0.2


def test_the_lognormal_has_the_published_quantiles() -> None:
    lengths = named("lognormal", 500, 10**6)
    at = lengths.grid
    assert at[int(0.99 * len(at))] / at[len(at) // 2] == pytest.approx(10, rel=0.02)
    assert pytest.approx(0.99, abs=0.01) == SIGMA


def test_extreme_and_trace(tmp_path: Path) -> None:
    extreme = named("extreme:100", 20, 4000)
    assert Counter(extreme.grid) == {20: 19_000, 2000: 1000}
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([5, 1, 9]))
    assert set(named(f"trace:{path}", 0, 100).grid) == {1, 5, 9}


def test_the_running_samples_are_the_long_ones() -> None:
    assert named("constant", 64, 1024).running_mean == 64
    assert named("lognormal", 64, 10**5).running_mean > 2 * 64


def test_steady_state() -> None:
    assert not is_steady([100] * 5)
    assert is_steady([0, 50, 100, 100, 100, 105, 103, 104])
    assert not is_steady([10, 20, 30, 40, 50, 60])
    assert is_steady([0] * 6)  # nothing is ever carried


def test_every_variant_sees_the_same_prompts() -> None:
    lengths = named("lognormal", 8, 40)
    one, other = Stream(3, lengths, 2, 5), Stream(3, lengths, 2, 5)
    assert one.take(4) == other.take(1) + other.take(3)
    assert (one.taken, other.taken) == (4, 4)
    other.ends_after = 6
    assert (len(other.take(9)), other.take(1), other.taken) == (2, [], 6)
    rejected = [prompt.rejected for prompt in one.take(2000)]
    assert sum(rejected) / len(rejected) == pytest.approx(REJECTED_SHARE, abs=0.04)


def measured(done: Round, seconds: float = 1.0, **counts: int) -> Measured:
    return Measured(done, seconds, **{"decoded": 0, "steps": 0, "prefilled": 0, "after_end": 0, **counts})


def round_of(*lengths: int, generated: int | None, carry: int, **rest: Any) -> Round:
    group = Group("a", list(lengths), oldest_version=3, off_policy=2, hybrid=1)
    return Round(5, [group], generated=generated, carry=carry, **rest)


def test_the_identity_catches_a_lost_token() -> None:
    good = [
        measured(round_of(10, 20, generated=45, carry=20)),
        measured(round_of(5, 5, generated=8, carry=16, wasted=2)),
    ]
    later = Block(30, [measured(round_of(7, generated=5, carry=28))])  # others had their turn in between
    assert check_identity([Block(5, good), later]) is True
    good[0].round.generated = 46
    with pytest.raises(IdentityError, match="54 generated, 40 delivered, carry grown by 11, 2 wasted"):
        check_identity([later, Block(5, good)])
    good[0].round.generated = None
    assert check_identity([Block(5, good)]) is None


def test_a_row() -> None:
    lengths = named("uniform", 10, 40)
    rounds = [
        measured(round_of(10, 20, generated=30, carry=0, bytes_by_tier={"host": 7}), 1.0, decoded=28, steps=14),
        measured(round_of(4, 6, generated=10, carry=0, prolonged=True, bytes_by_tier={"host": 3}), 3.0, after_end=9),
    ]
    row = figures([Block(0, rounds[:1]), Block(0, rounds[1:])], PLAN, lengths, limits=(15.0, 25.0))
    assert (row["delivered_tokens_per_s"], row["delivered_groups_per_s"]) == (10, 0.5)
    assert row["share_of_limit"] == 10 / 18.75  # as many tokens at 15 a second as at 25
    assert (row["off_policy_share"], row["hybrid_share"]) == (4 / 40, 2 / 40)
    assert row["staleness"] == {"2": 2}
    assert (row["tokens_after_end"], row["rounds_prolonged"], row["peak_bytes"]) == (9, 1, {"host": 7})
    assert (row["mean_running"], row["identity"], row["biased"]) == (2.0, True, True)
    other = {**row, "delivered_groups_per_s": 0.25, "delivered_tokens_per_s": 4.0}
    assert ratios(row, other) == {"tokens": 2.5, "groups": 2.0, "headline": 2.0}


def test_a_row_that_delivers_its_carry_is_not_steady() -> None:
    rounds = [measured(round_of(50, 50, generated=90, carry=carry)) for carry in (95, 90)]
    assert is_level([Block(110, rounds)])
    assert not is_level([Block(111, rounds)])
    assert not is_level([Block(100, rounds), Block(40, rounds[:1])])


def test_without_the_long_responses_extreme_is_biased() -> None:
    lengths = named("extreme:100", 20, 2000)
    block = [Block(0, [measured(round_of(*[20] * 96, generated=1920, carry=0))])]
    assert figures(block, PLAN, lengths, limits=(1.0,))["biased"]


def test_the_carry_of_requests_in_flight_is_what_was_drawn_and_not_delivered() -> None:
    """The counter has not seen first tokens; the client knows of them when a request ends."""
    track = Track(Bed(ANY, ANY, (Path("a"), Path("b")), PRESETS["tiny"]), Cell("lognormal", "async"))
    first = Round(1, [Group("a", [5])], legs=1)
    track._note(measured(first, decoded=10))
    first.legs += 1  # aborted between the rounds
    track._note(measured(Round(2, [Group("b", [7])], legs=1, after_end=None), decoded=0))
    assert track.carried == [6, 1]


def test_rejected_groups_are_not_delivered_tokens() -> None:
    done = round_of(3, 4, generated=18, carry=0, wasted=11)
    done.groups.append(Group("b", [5, 6], rejected=True))
    assert (done.tokens, done.trained_groups) == (7, 1)
    assert check_identity([Block(0, [measured(done)])])


def counters(time: float, running: int, steps: int, decoded: int, waiting: int = 0) -> Counters:
    return Counters(time, running, waiting, steps, decoded, 0)


def test_tokens_after_the_end_are_counted_from_the_clients_look() -> None:
    done = round_of(1, 1, generated=0, carry=0, decoded_at_end=130)
    assert between(counters(0, 0, 0, 100), counters(1, 0, 9, 150), done, 1.0).after_end == 20


def test_the_limit_is_taken_while_the_batch_is_full() -> None:
    seen = [counters(0, 4, 0, 0, 2), counters(1, 8, 10, 80), counters(3, 8, 30, 240), counters(4, 5, 40, 300)]
    assert (of_snapshots(seen, 8).rate, of_snapshots(seen, 8).step_s) == (80.0, 0.1)
    with pytest.raises(RuntimeError, match="never seen full twice"):
        of_snapshots(seen[:2], 8)


def test_the_halves_of_a_full_batch_have_their_own_contexts() -> None:
    seen = [
        counters(0, 0, 5, 50),
        counters(1, 8, 15, 130),
        counters(1, 8, 15, 130),
        counters(2, 8, 35, 290),
        counters(4, 8, 55, 450),
    ]
    # 8 rows of 3 prompt tokens; 50 tokens had been decoded before this batch.
    assert of_snapshots(seen, 8, 3).halves == (Point(8, 24 + 160, 0.05), Point(8, 24 + 320, 0.1))


def test_hybrid_are_tokens_of_this_version_on_older_kv() -> None:
    group = Open(Prompt("a", [1], [6, 3]))
    group.output_ids = [[1] * 6, [1] * 3]
    group.legs = [[Leg(1, 2), Leg(2, 4)], [Leg(2, 3)]]
    done = group.delivered(2, hybrid=True)
    assert (done.lengths, done.oldest_version, done.off_policy, done.hybrid) == ([6, 3], 1, 2, 4)
    assert group.delivered(2, hybrid=False).hybrid == 0


class OneAtATime:
    """An engine in which the third request hangs until it is aborted, with one token; the others finish."""

    patched = False

    def __init__(self) -> None:
        self.waiting: list[asyncio.Event] = []
        self.aborted = False

    async def post(self, route: str, body: dict[str, Any]) -> Any:
        event = asyncio.Event()
        self.waiting.append(event)
        if len(self.waiting) != 3:
            event.set()
        await event.wait()
        answers = []
        for params in body["sampling_params"]:
            count = 1 if self.aborted else params["max_new_tokens"]
            meta = {"prompt_tokens": 3, "cached_tokens": 0}
            answers.append({"output_ids": [7] * count, "meta_info": meta})
        return answers

    async def abort_all(self) -> None:
        self.aborted = True
        for event in self.waiting:
            event.set()

    async def counters(self) -> Counters:
        return counters(0, 0, 0, 0)


def test_outside_carries_surplus_and_partials_and_loses_nothing() -> None:
    async def scene() -> tuple[Round, Round, Outside]:
        stream = Stream(0, named("constant", 5, 9), 2, 3)
        variant = Outside(OneAtATime(), replace(PLAN, over_sampling=3.0), stream)  # type: ignore[arg-type]
        first = await variant.round()
        variant.engine.aborted = False  # type: ignore[attr-defined]
        return first, await variant.drain(), variant

    first, last, variant = asyncio.run(scene())
    assert [group.lengths for group in first.groups] == [[5, 5]]
    assert (first.generated, first.carry) == (10 + 10 + 2, 10 + 2)  # the second to finish is surplus, the third cut
    assert check_identity([Block(0, [measured(first), measured(last)])])
    assert sorted(variant.delivered) == [f"p{i}/{j}" for i in range(3) for j in range(2)]
    assert last.reprefilled == 6


def test_a_pause_replaces_what_the_filter_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = named("lognormal", 8, 40)
    variant = PauseInPlace(ANY, replace(PLAN, filtered=True, groups=3), Stream(0, lengths, 2, 4))
    monkeypatch.setattr(variant, "_start", lambda group: variant.tasks.update({cast(Any, object()): group}))
    variant._fill(variant._target)
    assert len(variant.tasks) == 6
    variant.pile.append(variant.tasks.popitem()[1])  # one has passed
    variant.refill()
    assert (len(variant.tasks), variant.stream.taken) == (5, 6)
    variant.tasks.popitem()  # one was rejected
    variant.refill()
    assert (len(variant.tasks), variant.stream.taken) == (5, 7)


def test_slimes_way_asks_for_the_load_and_sleeps_while_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted request runs for one more step: the first look finds it nearly always."""
    engine, slept = OneAtATime(), []
    loads = iter([counters(0, 3, 0, 7), counters(0, 2, 0, 7), counters(0, 0, 0, 7, waiting=1), counters(0, 0, 0, 7)])

    async def look() -> Counters:
        return next(loads)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def scene() -> Round:
        stream = Stream(0, named("constant", 5, 9), 2, 3)
        return await OutsideRetry(engine, replace(PLAN, over_sampling=3.0), stream).round()  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "counters", look)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert len(asyncio.run(scene()).groups) == 1
    assert slept == [3.0, 3.0]


def test_a_trainers_time_is_a_share_of_its_own_workloads_rounds() -> None:
    bed = Bed(ANY, ANY, (Path("a"), Path("b")), PRESETS["tiny"])
    row = {"variant": "async", "ablation": None, "distribution": "lognormal", "seconds": 16.0, "rounds": 8}
    others = [{"distribution": "constant", "seconds": 8.0}, {"variant": "outside"}, {"ablation": "n 8", "seconds": 1.0}]
    for other in ({}, *others):
        bed.note_rollout({**row, **other})
    assert bed.rollout_s == {"lognormal": 2.0, "constant": 1.0}


def test_presets_name_variants_that_exist_and_begin_with_the_main_table() -> None:
    for preset in PRESETS.values():
        cells = list(preset.cells())
        assert {cell.variant for cell in cells} <= set(KINDS)
        assert [cell.variant for cell in cells[: len(MAIN)]] == list(MAIN)
        keys = [(c.distribution, c.variant, c.ablation, c.repetition) for c in cells]
        assert len(keys) == len(set(keys))
    assert {cell.variant for cell in PRESETS["tiny"].cells()} == set(KINDS) - {"april-factor"}
    assert PRESETS["april/8"].longest == 2048
    for gpu_gb in (80, 141):
        for name in ("april", "long"):
            short = PRESETS[name].eighth(gpu_gb)
            assert 2 * (11e9 + short.pool * 144 * 1024) < 0.86e9 * gpu_gb
            assert short.pool > 4 * short.plan.slots * (short.mean + short.prompt_tokens)
            assert short.plan.groups * PRESETS[name].plan.slots == pytest.approx(
                PRESETS[name].plan.groups * short.plan.slots, rel=0.3
            )
    assert set(PRESETS["cpu"].lengths("extreme:100").grid) == {20, 2000}
    assert PRESETS["cpu"].context >= 16 + 2000


def test_what_is_compared_is_measured_in_turns() -> None:
    cells = list(PRESETS["cpu"].cells())
    groups = in_turns(cells)
    assert [cell for group in groups for cell in group] == cells
    assert [[cell.variant for cell in group] for group in groups[:5]] == [list(MAIN)] * 5
    assert [group[0].repetition for group in groups[:5]] == [0, 1, 2, 3, 4]
    for group in groups:
        assert len({(cell.distribution, cell.together or cell.ablation, cell.repetition) for cell in group}) == 1
        assert len({kind(cell) for cell in group}) == 1
    tables = [[(cell.variant, cell.ablation) for cell in group] for group in groups]
    assert next(table for table in tables if len(table) > 1 and table[0][0] == "stale-reuse")[-2:] == [
        ("async", None),
        ("april-continue", None),
    ]
    assert max(map(len, tables)) == 11  # over-sampling: two ways at five factors, and demand-driven admission


def test_each_kind_takes_turns_with_its_own() -> None:
    names = ("synchronous", "april-keep", "async", "april-continue")
    cells = [Cell("lognormal", name) for name in names]
    assert [len(group) for group in in_turns(cells)] == [2, 2]
    assert [kind(group[0]) for group in in_turns(cells)] == [Turns.ROUNDS, Turns.BLOCKS]
    mixed = [Cell("trace:a.json", name) for name in KINDS]
    assert sorted(len(group) for group in in_turns(mixed)) == [5, 7]


def test_the_order_of_turns_changes() -> None:
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
        super().__init__(Bed(stock, stock, (Path("a"), Path("b")), preset, given_limit=1.0), {}, "run", self._kept)

    async def _flushed(self) -> None:
        self.seen.append("flush")

    def _kept(self, _row: Row) -> None:
        raise AssertionError("there are no rows")

    async def _warm(self, cell: Cell) -> Any:
        async def block(rounds: int) -> None:
            assert rounds == BLOCK
            self.seen.append(cell.variant)

        return SimpleNamespace(block=block)

    async def _row(self, *_: Any, **__: Any) -> None:
        pass


def test_no_block_pays_for_what_others_left_in_the_tree() -> None:
    runner = Takings()
    left_out = asyncio.run(runner.run([Cell("lognormal", "async"), Cell("lognormal", "april-continue")], float("inf")))
    assert left_out == 0
    assert runner.seen == ["flush", "async", "flush", "april-continue"] * 2


def test_only_a_refused_field_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant that this version of the server does not know has no row; a fault ends the run."""
    runner, cells = Takings(), [Cell("lognormal", "async")]

    async def refuse(status: int) -> None:
        raise EngineError("POST /april/rollout", status, b"{}")

    monkeypatch.setattr(runner, "_measure", lambda *_: refuse(400))
    assert asyncio.run(runner.run(cells, float("inf"))) == 0
    monkeypatch.setattr(runner, "_measure", lambda *_: refuse(503))
    with pytest.raises(EngineError, match="POST /april/rollout: 503"):
        asyncio.run(runner.run(cells, float("inf")))
