"""bench.rollout's arithmetic: lengths, the steady state, the identity, rows."""

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.rollout.baselines import OpenGroup, Outside, RequestLeg
from bench.rollout.engine_client import Counters
from bench.rollout.lengths import SIGMA, named
from bench.rollout.limit import DecodeRate, decode_rate, of_snapshots
from bench.rollout.metrics import Block, IdentityError, between, check_identity, grown, round_metrics
from bench.rollout.presets import PRESETS, Cell
from bench.rollout.runner import Track, _blocks_level
from bench.rollout.steady_state import is_steady
from bench.rollout.testbed import Testbed
from bench.rollout.variant import DeliveredGroup, RoundResult, lost
from bench.rollout.workload import REJECTED_SHARE, Stream, WorkloadPrompt
from tests.unit.round_fixtures import ANY, PLAN, counters, measured


@pytest.mark.parametrize("name", ["lognormal", "pareto", "uniform", "constant"])
def test_distribution_has_the_requested_mean(name: str) -> None:
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
    assert is_steady([0] * 3)  # synchronous: nothing is ever carried
    assert not is_steady([0] * 2)
    assert not is_steady([0, 0, 7])


def test_every_variant_sees_the_same_prompts() -> None:
    lengths = named("lognormal", 8, 40)
    one, other = Stream(3, lengths, 2, 5), Stream(3, lengths, 2, 5)
    assert one.take(4) == other.take(1) + other.take(3)
    assert (one.taken, other.taken) == (4, 4)
    other.ends_after = 6
    assert (len(other.take(9)), other.take(1), other.taken) == (2, [], 6)
    rejected = [prompt.rejected for prompt in one.take(2000)]
    assert sum(rejected) / len(rejected) == pytest.approx(REJECTED_SHARE, abs=0.04)


def round_of(*lengths: int, generated: int | None, carry: int, **rest: Any) -> RoundResult:
    group = DeliveredGroup("a", list(lengths), oldest_version=3, off_policy=2, hybrid=1)
    return RoundResult(5, [group], generated=generated, carry=carry, **rest)


def test_the_identity_catches_a_lost_token() -> None:
    good = [
        measured(round_of(10, 20, generated=45, carry=20)),
        measured(round_of(5, 5, generated=8, carry=16, wasted=2)),
    ]
    later = Block(30, [measured(round_of(7, generated=5, carry=28))])  # others had their turn in between
    assert check_identity([Block(5, good), later]) is True
    assert [grown(block) for block in (Block(5, good), later)] == [11, -2]
    good[0].round.generated = 46
    with pytest.raises(IdentityError, match="54 generated, 40 delivered, carry grown by 11, 2 wasted"):
        check_identity([later, Block(5, good)])
    good[0].round.generated = None
    assert check_identity([Block(5, good)]) is None


def test_a_sample_that_is_neither_delivered_nor_held_is_lost() -> None:
    variant = Outside(ANY, PLAN, Stream(0, named("constant", 4, 8), PLAN.n, 5))
    first, second, third = variant._new(3)
    variant._partials, variant._surplus = [second], [third]
    variant._begin()
    variant._end([first], carry=0)
    assert (variant.held, lost(variant, PLAN.n)) == (4, (0, 0))
    variant._surplus = []
    assert lost(variant, PLAN.n) == (2, 0)
    variant._end([first], carry=0)
    assert lost(variant, PLAN.n) == (2, 2)


def test_a_row() -> None:
    lengths = named("uniform", 10, 40)
    rounds = [
        measured(round_of(10, 20, generated=30, carry=0, bytes_by_tier={"host": 7}), 1.0, decoded=28, steps=14),
        measured(round_of(4, 6, generated=10, carry=0, prolonged=True, bytes_by_tier={"host": 3}), 3.0, after_end=9),
    ]
    row = round_metrics([Block(0, rounds[:1]), Block(0, rounds[1:])], PLAN, lengths, limits=(15.0, 25.0))
    assert (row["delivered_tokens_per_s"], row["delivered_groups_per_s"]) == (10, 0.5)
    assert row["share_of_limit"] == 10 / 18.75  # as many tokens at 15 a second as at 25
    assert (row["off_policy_share"], row["hybrid_share"]) == (4 / 40, 2 / 40)
    assert row["staleness"] == {"2": 2}
    assert (row["tokens_after_end"], row["rounds_prolonged"], row["peak_bytes"]) == (9, 1, {"host": 7})
    assert (row["mean_running"], row["identity"], row["biased"]) == (2.0, True, True)
    assert (row["computed_tokens"], row["carry_grown"]) == (28, 0)


def test_a_row_that_delivers_its_carry_is_not_steady() -> None:
    rounds = [measured(round_of(50, 50, generated=90, carry=carry)) for carry in (95, 90)]
    assert _blocks_level([Block(110, rounds)])
    assert not _blocks_level([Block(111, rounds)])
    assert not _blocks_level([Block(100, rounds), Block(40, rounds[:1])])


def test_without_the_long_responses_extreme_is_biased() -> None:
    lengths = named("extreme:100", 20, 2000)
    block = [Block(0, [measured(round_of(*[20] * 96, generated=1920, carry=0))])]
    assert round_metrics(block, PLAN, lengths, limits=(1.0,))["biased"]


def test_the_carry_of_requests_in_flight_is_what_was_drawn_and_not_delivered() -> None:
    """The counter has not seen first tokens; the client knows of them when a request ends."""
    track = Track(Testbed(ANY, ANY, (Path("a"), Path("b")), PRESETS["tiny"]), Cell("lognormal", "async"))
    first = RoundResult(1, [DeliveredGroup("a", [5])], legs=1)
    track._note(measured(first, decoded=10))
    first.legs += 1  # aborted between the rounds
    track._note(measured(RoundResult(2, [DeliveredGroup("b", [7])], legs=1, after_end=None), decoded=0))
    assert track.carried == [6, 1]


def test_rejected_groups_are_not_delivered_tokens() -> None:
    done = round_of(3, 4, generated=18, carry=0, wasted=11)
    done.groups.append(DeliveredGroup("b", [5, 6], rejected=True))
    assert done.tokens == 7
    assert check_identity([Block(0, [measured(done)])])


def test_tokens_after_the_end_are_counted_from_the_clients_read() -> None:
    done = round_of(1, 1, generated=0, carry=0, decoded_at_end=130)
    assert between(counters(0, 0, 0, 100), counters(1, 0, 9, 150), done, 1.0).after_end == 20


def test_the_limit_is_taken_while_the_batch_is_full() -> None:
    seen = [counters(0, 4, 0, 0, 2), counters(1, 8, 10, 80), counters(3, 8, 30, 240), counters(4, 5, 40, 300)]
    assert of_snapshots(seen, 8).rate == 80.0
    with pytest.raises(RuntimeError, match="never seen full twice"):
        of_snapshots(seen[:2], 8)


def test_batch_that_no_probe_saw_is_decoded_again() -> None:
    requested: list[int] = []

    class Quick:
        """A server whose first batch is over at once, and whose second half is not observed."""

        async def post(self, _route: str, body: dict[str, Any]) -> None:
            requested.append(len(body["input_ids"]))
            await asyncio.sleep(0.03 * (len(requested) - 1))

        async def counters(self) -> Counters:
            at = time.monotonic()
            return counters(at, 8, int(1000 * at), int(8000 * at))

    engine: Any = Quick()
    assert asyncio.run(decode_rate(engine, 8, 40, 3)).rate == pytest.approx(8000, rel=0.2)
    assert requested == [8, 8]


def test_the_halves_of_a_full_batch_have_their_own_contexts() -> None:
    seen = [
        counters(0, 0, 5, 50),
        counters(1, 8, 15, 130),
        counters(1, 8, 15, 130),
        counters(2, 8, 35, 290),
        counters(4, 8, 55, 450),
    ]
    # 8 rows of 3 prompt tokens; 50 tokens had been decoded before this batch.
    assert of_snapshots(seen, 8, 3).halves == (DecodeRate(8, 24 + 160, 0.05), DecodeRate(8, 24 + 320, 0.1))


def test_hybrid_tokens_are_of_this_version_on_older_kv() -> None:
    group = OpenGroup(WorkloadPrompt("a", [1], [6, 3]))
    group.output_ids = [[1] * 6, [1] * 3]
    group.legs = [[RequestLeg(1, 2), RequestLeg(2, 4)], [RequestLeg(2, 3)]]
    done = group.delivered(2, hybrid=True)
    assert (done.lengths, done.oldest_version, done.off_policy, done.hybrid) == ([6, 3], 1, 2, 4)
    assert group.delivered(2, hybrid=False).hybrid == 0
