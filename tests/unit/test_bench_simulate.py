"""bench.simulate: the model against what can be said without it."""

from dataclasses import replace

import pytest

from bench.costs import decode_fit
from bench.rollout.lengths import named
from bench.rollout.presets import PRESETS
from bench.rollout.variant import Plan
from bench.rollout.workload import Stream
from bench.round_model import Costs, Outcome, Simulation
from bench.simulate import H100_4B, context_of, reach, simulated, validate

FLAT = Costs(step_s=1.0, row_s=0.0)
PLAN = Plan(slots=8, groups=4, n=2)


def run(variant: str, distribution: str = "lognormal", costs: Costs = FLAT, gather: float = 1.0) -> Outcome:
    stream = Stream(0, named(distribution, 20, 200), PLAN.n, 4)
    return Simulation(variant, PLAN, stream, costs, gather).run()


def test_a_round_of_equal_lengths_takes_exactly_its_steps() -> None:
    # A free prefill gives the first of 20 tokens, 19 decode steps of a second the rest, for 8 samples in 8 slots.
    out = run("synchronous", "constant")
    assert out.rate == pytest.approx(8 * 20 / 19)
    assert (out.prefill_s, out.between_s) == (0, 0)


def test_the_order_of_the_variants_on_a_long_tail() -> None:
    names = ("synchronous", "outside", "april-recompute", "april-keep")
    rates = {name: run(name, gather=0.0).rate for name in names}
    assert rates["synchronous"] < rates["outside"] <= rates["april-keep"] * 1.001
    costly = replace(FLAT, prefill_s=1.0, prefill_token_s=0.1)
    assert run("april-recompute", costs=costly).rate < run("april-keep", costs=costly).rate


def test_ours_reaches_the_full_batch_rate_when_nothing_but_decoding_costs() -> None:
    assert run("april-keep", gather=0.0).rate == pytest.approx(FLAT.full_rate(8, 0), rel=0.12)


def test_admission_that_waits_saves_prefills_and_costs_slots() -> None:
    costs = replace(FLAT, prefill_s=1.0)
    at_once, gathered = run("april-keep", costs=costs, gather=0.0), run("april-keep", costs=costs)
    assert gathered.prefill_s < 0.6 * at_once.prefill_s
    assert gathered.rate > at_once.rate
    assert run("april-keep").rate < run("april-keep", gather=0.0).rate


def test_a_gap_between_rounds_is_counted_once_a_round() -> None:
    assert run("april-keep", costs=replace(FLAT, push_s=3.0, gap_s=2.0)).between_s == pytest.approx(20 * 5.0)


def test_decode_fit_finds_the_costs_and_none_below_zero() -> None:
    points = [(rows, kv, 0.01 + 2e-4 * rows + 1e-6 * kv) for rows in (1, 16, 64) for kv in (100, 5000, 40_000)]
    assert decode_fit(points) == pytest.approx((0.01, 2e-4, 1e-6), rel=1e-6)
    assert decode_fit([(rows, kv, 0.01 - 1e-7 * kv) for rows, kv, _ in points])[2] == 0.0


def test_validate_says_which_variants_are_within_ten_per_cent() -> None:
    preset = replace(PRESETS["tiny"], name="p")
    limit = H100_4B.full_rate(preset.plan.slots, context_of(preset))
    share = simulated(preset, preset.plan, "april-keep", H100_4B).rate / limit
    row = {"bench": "rollout", "preset": "p", "run_id": "r", "time": "1", "distribution": "lognormal", "ablation": None}
    plan = {"slots": 16, "groups": 3, "n": 2}
    rows = [
        {**row, "plan": plan, "variant": "april-keep", "share_of_limit": share * 1.05},
        {**row, "plan": plan, "variant": "synchronous", "share_of_limit": share * 99},
    ]
    told = {line["variant"]: line["within"] for line in validate(preset, H100_4B, rows)}
    assert told == {"synchronous": False, "april-keep": True}


def test_reach_accounts_for_all_the_time() -> None:
    for line in reach(PRESETS["tiny"], H100_4B):
        assert line["decode"] + line["prefill"] + line["between"] == pytest.approx(1.0)
