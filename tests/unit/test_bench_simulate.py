"""bench.simulate: the model against known results."""

from dataclasses import asdict, replace
from math import ceil

import pytest

from bench.rollout.lengths import named
from bench.rollout.limit import DecodeRate
from bench.rollout.presets import PRESETS
from bench.rollout.variant import Plan
from bench.rollout.workload import Stream
from bench.simulate import H100_4B, costs_of, fitted_cost, reach, simulated, validate
from bench.simulated_engine import Costs, SimulatedEngine
from bench.simulated_rounds import MEASURED, VARIANTS, WARM, Outcome, Simulation
from bench.step_costs import Observed, Stall

FLAT = Costs(step_s=1.0, row_s=0.0)
PLAN = Plan(slots=8, groups=4, n=2)


def run(
    variant: str, distribution: str = "lognormal", costs: Costs = FLAT, batching: float = 1.0, engines: int = 1
) -> Outcome:
    stream = Stream(0, named(distribution, 20, 200), PLAN.n, 4)
    plan = replace(PLAN, groups=PLAN.groups * engines)
    return Simulation(variant, plan, stream, costs, batching, engines).run()


def test_a_round_of_equal_lengths_takes_exactly_its_steps() -> None:
    # A free prefill gives the first of 20 tokens, 19 decode steps of a second the rest, for 8 samples in 8 slots.
    out = run("synchronous", "constant")
    assert out.rate == pytest.approx(8 * 20 / 19)
    assert (out.prefill_s, out.between_s) == (0, 0)


def test_the_order_of_the_variants_on_a_long_tail() -> None:
    names = ("synchronous", "outside", "april-recompute", "april-keep")
    rates = {name: run(name, batching=0.0).rate for name in names}
    assert rates["synchronous"] < rates["outside"] <= rates["april-keep"] * 1.001
    costly = replace(FLAT, prefill_s=1.0, prefill_token_s=0.1)
    assert run("april-recompute", costs=costly).rate < run("april-keep", costs=costly).rate


def test_batch_quota_reaches_the_full_batch_rate_when_only_decoding_costs() -> None:
    assert run("april-keep", batching=0.0).rate == pytest.approx(FLAT.full_rate(8, 0), rel=0.12)


def test_batched_prefills_save_time_and_cost_slots() -> None:
    costs = replace(FLAT, prefill_s=1.0)
    at_once, batched = run("april-keep", costs=costs, batching=0.0), run("april-keep", costs=costs)
    assert batched.prefill_s < 0.6 * at_once.prefill_s
    assert batched.rate > at_once.rate
    assert run("april-keep").rate < run("april-keep", batching=0.0).rate


def test_a_gap_between_rounds_is_counted_once_a_round() -> None:
    assert run("april-keep", costs=replace(FLAT, push_s=3.0, gap_s=2.0)).between_s == pytest.approx(MEASURED * 5.0)


def test_fit_recovers_costs_and_none_is_negative() -> None:
    seen = Observed(pushes=[0.2, 0.1, 0.3], aborts=[0.05])
    seen.decodes = [DecodeRate(rows, kv, 0.01 + 2e-4 * rows + 1e-6 * kv) for rows in (1, 16, 64) for kv in (100, 5000)]
    seen.stalls = [
        Stall(count, ids, 0.008 + 1e-3 * count + 2e-5 * ids) for count, ids in ((1, 16), (16, 256), (1, 256))
    ]
    seen.prefills = [(64, 1024, 0.008 + 64e-3 + 1024 * 2e-5 + 0.03)]
    costs = seen.costs()
    assert (costs.step_s, costs.row_s, costs.kv_token_s) == pytest.approx((0.01, 2e-4, 1e-6), rel=1e-6)
    assert (costs.prefill_s, costs.prefill_sample_s, costs.prefill_token_s) == pytest.approx((0.008, 1e-3, 2e-5))
    assert (costs.push_s, costs.gap_s, costs.abort_s) == pytest.approx((0.2, 0.03, 0.08))
    assert seen.step_ms().keys() == {"1", "16", "64"}
    assert seen.step_ms()["16"] == pytest.approx(13.2 + 2.55, abs=1e-3)
    falling = Observed(seen.decodes, [Stall(count, ids, 0.01 - 1e-6 * ids) for count, ids, _ in seen.stalls])
    assert falling.costs().prefill_token_s == 0.0


def test_joining_samples_have_their_own_cost() -> None:
    out = run("april-keep", costs=replace(FLAT, prefill_sample_s=1.0))
    assert out.prefill_s == pytest.approx(MEASURED * PLAN.samples, rel=0.05)  # one for each that is delivered
    assert out.rate < 0.8 * run("april-keep").rate


def test_validate_uses_the_costs_measured_with_each_row() -> None:
    preset = replace(PRESETS["tiny"], name="p")
    row = {"bench": "rollout", "preset": "p", "run_id": "r", "time": "1", "distribution": "lognormal", "ablation": None}
    row |= {"plan": {"slots": 16, "groups": 3, "n": 2}}
    slow = replace(H100_4B, step_s=0.05)
    rates = [simulated(preset, preset.plan, "april-keep", costs).rate for costs in (H100_4B, slow)]
    reported = [
        {**row, "variant": "april-keep", "delivered_tokens_per_s": rates[0] * 1.05, "costs": asdict(H100_4B)},
        {**row, "variant": "april-keep", "delivered_tokens_per_s": rates[1] * 1.05, "costs": asdict(slow)},
        {**row, "variant": "outside", "delivered_tokens_per_s": 1.0, "costs": None},
        {**row, "variant": "synchronous", "delivered_tokens_per_s": rates[0] * 99, "costs": asdict(H100_4B)},
    ]
    reported = [{**one, "repetition": number} for number, one in enumerate(reported)]
    found = {line["variant"]: line for line in validate(preset, reported)}
    assert {name: line["within"] for name, line in found.items()} == {"synchronous": False, "april-keep": True}
    assert found["april-keep"]["ratio"] == pytest.approx(1 / 1.05)


def test_ends_and_joins_are_fitted_on_a_row_each_and_predict_the_others() -> None:
    preset = replace(PRESETS["tiny"], name="p")
    row = {"bench": "rollout", "preset": "p", "run_id": "r", "time": "1", "distribution": "lognormal", "ablation": None}
    row |= {"plan": {"slots": 16, "groups": 3, "n": 2}, "costs": asdict(H100_4B)}
    real = replace(H100_4B, follow_s=0.02, finish_s=0.01)
    reported = [
        {**row, "variant": name, "delivered_tokens_per_s": simulated(preset, preset.plan, name, real).rate}
        for name in ("april-keep", "april-keep", "april-recompute", "outside", "outside", "async")
    ]
    reported = [{**one, "repetition": number} for number, one in enumerate(reported)]
    found = {line["variant"]: line for line in validate(preset, reported)}
    assert (found["async"]["finish_ms"], found["async"]["follow_ms"]) == pytest.approx((10, 20), rel=0.02)
    assert [line["ratio"] for line in found.values()] == pytest.approx([1.0] * 4, rel=0.01)
    assert found["async"]["ratio_without_fit"] > 1.015
    assert fitted_cost(preset, {**reported[0], "delivered_tokens_per_s": 1e9}, "follow_s", {}) == 0.0


def test_reach_uses_mean_costs_of_the_newest_rows() -> None:
    preset = replace(PRESETS["tiny"], name="p")
    row = {"bench": "rollout", "preset": "p", "run_id": "r", "time": "1", "distribution": "lognormal", "ablation": None}
    found = [replace(FLAT, step_s=seconds) for seconds in (1.0, 3.0)]
    rows = [{**row, "variant": "april-keep", "repetition": i, "costs": asdict(one)} for i, one in enumerate(found)]
    rows.append({**row, "variant": "outside", "repetition": 0, "costs": asdict(H100_4B)})
    rows.append({**rows[0], "distribution": "constant", "costs": asdict(H100_4B)})
    assert costs_of(rows, preset) == replace(FLAT, step_s=2.0)
    with pytest.raises(SystemExit, match="no rows of preset tiny with costs"):
        costs_of(rows, PRESETS["tiny"])


def test_warm_up_covers_the_longest_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rounds first the model would see the carry of long responses build up, as first-finished does."""
    requested: list[tuple[int, int]] = []
    monkeypatch.setattr(Simulation, "run", lambda _self, warm, measured: requested.append((warm, measured)))
    plan = replace(PRESETS["tiny"].plan, groups=30)
    for distribution in ("lognormal", "extreme:100"):
        simulated(PRESETS["tiny"], plan, "april-keep", FLAT, distribution=distribution)
    # 2,000 tokens, three times over, in rounds of 60 samples of 20 or 2,000 tokens on 16 slots.
    assert requested == [(WARM, MEASURED), (ceil(3 * 2000 / (60 * 119 / 16)), MEASURED)]
    assert requested[1] != requested[0]


def test_reach_accounts_for_all_the_time() -> None:
    for line in reach(PRESETS["tiny"], H100_4B):
        assert line["decode"] + line["prefill"] + line["between"] == pytest.approx(1.0)


def test_costs_between_two_rounds() -> None:
    costs = replace(FLAT, push_s=1.0, gap_s=2.0, abort_s=4.0)
    between = {variant: round(run(variant, costs=costs).between_s / MEASURED, 6) for variant in VARIANTS}
    aborting = {"outside": 5, "stale-reuse": 5, "outside-retry3s": 8}
    assert between == dict.fromkeys(VARIANTS, 3) | aborting | {"async": 1, "april-continue": 1}


def test_cost_of_a_partial() -> None:
    """Tokens prefilled for each that is delivered; a prompt has 4 of them, a response 20."""
    costs = replace(FLAT, prefill_token_s=1.0)
    outcomes = {variant: run(variant, costs=costs, batching=0.0) for variant in VARIANTS}
    share = {name: out.prefill_s / out.tokens for name, out in outcomes.items()}
    prompts = 4 / 20
    for name in ("synchronous", "pause-in-place", "async"):
        assert share[name] == pytest.approx(prompts, rel=0.1), name
    for name in ("april-keep", "april-continue"):  # one member of two is prefilled, or both if a push comes between
        assert 0.45 * prompts < share[name] < 0.9 * prompts, name
    assert prompts < share["stale-reuse"] < share["outside"]
    assert share["april-recompute"] > 2 * share["april-keep"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_steps_at_once_equal_single_steps(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs(0.51371, 0.010313, 1.0337e-3, 0.71119, 1.0151e-3, 1.0, 0.2, 0.4, 0.010971, 0.050713)
    stretches = [run(variant, costs=costs, engines=engines) for engines in (1, 3)]
    monkeypatch.setattr(SimulatedEngine, "_undisturbed", lambda engine: 1)
    for engines, out in zip((1, 3), stretches, strict=True):
        single = run(variant, costs=costs, engines=engines)
        assert asdict(single) == pytest.approx(asdict(out), rel=1e-9)


def test_slowest_of_many_engines_delays_synchronous_rounds() -> None:
    rates = {
        (name, n): run(name, batching=0.0, engines=n).rate for name in ("synchronous", "april-keep") for n in (1, 16)
    }
    assert rates["synchronous", 16] < 0.75 * rates["synchronous", 1]
    # Others finish the step in which the quota is met.
    assert rates["april-keep", 16] > 0.95 * rates["april-keep", 1]


def test_kv_that_is_moved_costs_both_ways() -> None:
    moved = run("april-keep", costs=replace(FLAT, move_token_s=0.01))
    assert moved.rate < run("april-keep").rate
    assert moved.prefill_s > 0, "the way back"
    assert run("april-recompute", costs=replace(FLAT, move_token_s=0.01)).rate == run("april-recompute").rate
