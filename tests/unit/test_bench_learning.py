"""bench.learning: its statistics against scipy and hand figures, its plan, its table and page from made-up rows."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scipy import stats

from bench import record
from bench.learning import SIZES, Bench, arguments, fields_of, plan, regime_of
from bench.learning_page import page, table, target
from bench.learning_stats import Paired, cost_to, final_reward, in_regime, ks_distance, paired, reward_at
from trainer_bridge.args import load


def test_paired_difference_matches_scipy() -> None:
    actual, base = {0: 0.81, 1: 0.84, 2: 0.79, 3: 0.9}, {0: 0.80, 1: 0.80, 2: 0.81, 3: 0.85, 7: 0.1}
    seeds = range(4)
    scipys = stats.ttest_rel([actual[s] for s in seeds], [base[s] for s in seeds]).confidence_interval(0.95)
    found = paired(actual, base)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.seeds == 4
    assert found.mean == pytest.approx(0.02)
    assert (found.low, found.high) == pytest.approx((scipys.low, scipys.high))


def test_interval_of_two_seeds_by_hand() -> None:
    found = paired({0: 1.0, 1: 1.2}, {0: 0.9, 1: 1.0})
    # Differences 0.1 and 0.2: s/√2 = 0.05, and t of one degree of freedom at 97.5 % is 12.7062.
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.15, 0.15 - 0.63531, 0.15 + 0.63531), abs=1e-5)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.019, 0.03, "not inferior"),
        (-0.021, 0.03, "open"),
        (-0.05, -0.021, "inferior"),
        (None, None, "one seed: no interval"),
    ],
)
def test_verdicts_against_the_margin(low: float | None, high: float | None, verdict: str) -> None:
    assert Paired(3, 0.0, low, high).verdict == verdict


def test_no_comparison_without_a_common_seed() -> None:
    assert paired({1: 0.5}, {2: 0.5}) is None
    assert paired({1: 0.75}, {1: 0.5}) == Paired(1, 0.25, None, None)


def test_ks_distance_matches_scipy() -> None:
    draw = random.Random(0)
    actual, base = ([draw.randrange(1, 40) for _ in range(count)] for count in (200, 331))
    found = ks_distance(Counter(actual), Counter(base))
    assert found == pytest.approx(stats.ks_2samp(actual, base).statistic)
    assert ks_distance({3: 2}, {3: 5}) == 0.0
    assert ks_distance({1: 1}, {2: 1}) == 1.0


def evaluations(*rewards: float) -> list[dict[str, Any]]:
    return [
        {"step": 5 * i, "samples_so_far": 100 * i, "seconds_so_far": 10.0 * i, "reward": reward, "reward_se": 0.01}
        for i, reward in enumerate(rewards)
    ]


def test_final_reward_averages_the_last_five_evaluations() -> None:
    assert final_reward(evaluations(0.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0)) == 3.0
    assert final_reward(evaluations(0.0, 0.5, 0.7)) == pytest.approx(0.6)


def test_reward_at_given_samples_is_interpolated() -> None:
    seen = [{"samples_so_far": count, "reward": reward} for count, reward in ((0, 0.2), (100, 0.4), (300, 0.8))]
    assert reward_at([100, 300], seen) == pytest.approx(0.6)
    assert reward_at([50, 200], seen) == pytest.approx((0.3 + 0.6) / 2)


def test_cost_to_a_target_is_interpolated() -> None:
    curve = evaluations(0.2, 0.4, 0.3, 0.8)
    assert cost_to(0.3, curve, "samples_so_far") == pytest.approx(50)
    assert cost_to(0.6, curve, "seconds_so_far") == pytest.approx(26)
    assert cost_to(0.1, curve, "samples_so_far") == 0
    assert cost_to(0.9, curve, "samples_so_far") is None


def test_regime_counts_tokens_and_samples() -> None:
    steps = [
        {"delivered_tokens": 300, "samples": 10, "off_policy_share": 0.5, "over_three_versions": 0.4},
        {"delivered_tokens": 100, "samples": 30, "off_policy_share": 0.1, "over_three_versions": 0.0},
    ]
    assert regime_of(steps) == pytest.approx({"off_policy_share": 0.4, "over_three_versions": 0.1})
    assert in_regime(0.4, 0.2)
    assert not in_regime(0.39, 0.9)
    assert not in_regime(0.9, 0.19)


def test_the_plan_is_paired_and_has_five_and_three_seeds() -> None:
    cells = list(plan(["synchronous", "keep", "cohort"], None))
    assert cells[:3] == [("synchronous", 0), ("keep", 0), ("cohort", 0)]
    assert Counter(variant for variant, _ in cells) == {"synchronous": 5, "keep": 5, "cohort": 3}
    assert len(set(cells)) == len(cells)


@pytest.mark.parametrize("variant", ["synchronous", "recompute", "keep", "keep-uncorrected", "cohort"])
def test_every_variant_is_a_configuration_of_the_bridge(variant: str, tmp_path: Path) -> None:
    made = load(None, fields_of(variant, 3, arguments(["--groups", "4"]), "http://there", tmp_path))
    assert made.loss.correction == ("none" if variant in ("synchronous", "keep-uncorrected") else "tis")
    assert made.staleness_bound == (0 if variant == "synchronous" else 24)
    assert made.pool_size == (4 if variant == "synchronous" else 32)
    assert made.on_end == "drop", "equal numbers of delivered samples"


def run_row(variant: str, seed: int, final: float, **fields: Any) -> dict[str, Any]:
    return {
        "run_id": "r",
        "kind": "run",
        "variant": variant,
        "seed": seed,
        "time": "2026-01-01T00:00:00Z",
        "commit": "abc",
        "machine": {"cpu": "a <cpu>", "cores": 2},
        "sizes": {},
        "reward_before": 0.5,
        "reward_final": final,
        "seconds": 60.0,
        "off_policy_share": 0.5,
        "over_three_versions": 0.25,
        "hybrid_share": 0.1,
        "kv_drift": None,
        "lengths": {"4": 2, "30": 1},
        "evaluations": evaluations(0.5, final, final),
        **fields,
    }


def test_table_and_page_from_rows() -> None:
    rows = [run_row("synchronous", seed, 0.9 + 0.01 * seed) for seed in (0, 1)]
    rows += [run_row("keep", seed, 0.91 + 0.01 * seed, kv_drift=0.02, lengths={"4": 3}) for seed in (0, 1)]
    found = {name: {row["seed"]: row for row in rows if row["variant"] == name} for name in ("synchronous", "keep")}
    assert target(found["synchronous"]) == pytest.approx(0.5 + 0.9 * 0.405)
    head, synchronous, keep = (dict(zip(table(found)[0], line, strict=True)) for line in table(found))
    assert list(head) == list(keep)
    assert synchronous["less synchronous"] == "–"
    assert (keep["less synchronous"], keep["verdict"]) == ("+0.0100", "not inferior")
    assert keep["KV drift"] == "0.0200"
    assert keep["KS of lengths"] == "0.333"
    text = page(rows)
    assert text.count("<img") == 3
    assert "a &lt;cpu&gt;" in text
    assert "No rows" in page([])


def test_a_variant_with_larger_steps_is_compared_at_equal_samples() -> None:
    base = run_row("synchronous", 0, 0.9)
    twice = [{**row, "samples_so_far": 2 * row["samples_so_far"]} for row in base["evaluations"]]
    _, _, cohort = table({"synchronous": {0: base}, "cohort": {0: run_row("cohort", 0, 0.9, evaluations=twice)}})
    # Of 0, 200 and 400 samples with 0.5, 0.9 and 0.9, at 100 and 200.
    assert cohort[3:5] == ["0.8000", "-0.1000"]


def test_run_continues_and_refuses_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(["--run-id", "r", "--out", str(tmp_path / "rows.json"), "--folder", str(tmp_path), "--seeds", "1"])
    args.variants = ["synchronous", "keep"]
    sizes = {name: getattr(args, name) for name in SIZES}
    record.append_rows(args.out, [run_row("synchronous", 0, 0.9, sizes=sizes)])
    trained: list[str] = []

    def train(fields: dict[str, Any], *_: Any) -> bool:
        trained.append(fields["run"])
        return True

    monkeypatch.setattr("bench.learning.train", train)
    monkeypatch.setattr(
        "bench.learning.run_metrics", lambda _: {"reward_before": 0.5, "reward_final": 0.8, "seconds": 1.0}
    )
    bench = Bench(args, "http://there", float("inf"), Console(quiet=True))
    bench.all()
    bench.all()
    assert trained == ["learning-keep-0"]
    assert [row["variant"] for row in bench.rows()] == ["synchronous", "keep"]
    args.steps = 7
    with pytest.raises(RuntimeError, match="other sizes"):
        Bench(args, "http://there", float("inf"), Console(quiet=True)).rows()
