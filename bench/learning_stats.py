"""The statistics of `bench.learning`: results of one run, paired differences over seeds, length distances, costs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bench.record import Row
from trainer_bridge.progress import read_rows

MARGIN = 0.02
"""Non-inferiority margin of held-out reward, at 97.5 % confidence."""
CONFIDENCE = 0.95
LAST = 5
"""Number of last evaluations that a run's held-out reward averages."""
OFF_POLICY = 0.4
OVER_THREE = 0.2
"""The regime in which corrections matter: smallest shares of off-policy tokens and of samples over ≥ 3 versions."""


@dataclass(frozen=True)
class Paired:
    """Differences of two variants on the same seeds. `low`, `high`: 95 % confidence interval of the mean (t)."""

    seeds: int
    mean: float
    low: float | None
    high: float | None

    @property
    def verdict(self) -> str:
        """The verdict of the interval against the margin."""
        if self.low is None or self.high is None:
            return "one seed: no interval"
        if self.low > -MARGIN:
            return "not inferior"
        return "inferior" if self.high < -MARGIN else "open"


def paired(variant: Mapping[int, float], base: Mapping[int, float]) -> Paired | None:
    """Differences variant − base over common seeds; None without any."""
    seeds = sorted(variant.keys() & base.keys())
    differences = np.array([variant[seed] - base[seed] for seed in seeds])
    if not seeds:
        return None
    mean = float(differences.mean())
    if len(seeds) < 2:
        return Paired(1, mean, None, None)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(seeds) - 1) * differences.std(ddof=1) / len(seeds) ** 0.5)
    return Paired(len(seeds), mean, mean - reach, mean + reach)


def final_reward(evaluations: Sequence[Mapping[str, Any]]) -> float:
    """Mean held-out reward of the last evaluations, without the one before training."""
    return float(np.mean([row["reward"] for row in evaluations if row["step"] > 0][-LAST:]))


def reward_at(samples: Sequence[float], evaluations: Sequence[Mapping[str, Any]]) -> float:
    """Mean held-out reward at these numbers of delivered samples, interpolated linearly between evaluations."""
    seen, rewards = ([row[key] for row in evaluations] for key in ("samples_so_far", "reward"))
    return float(np.interp(samples, seen, rewards).mean())


def cost_to(target: float, evaluations: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """`samples_so_far` or `seconds_so_far` at which held-out reward first reaches the target, interpolated linearly;
    None if it never does."""
    before: Mapping[str, Any] | None = None
    for row in evaluations:
        if row["reward"] >= target:
            if before is None:
                return float(row[key])
            share = (target - before["reward"]) / (row["reward"] - before["reward"])
            return float(before[key] + share * (row[key] - before[key]))
        before = row
    return None


def ks_distance(variant: Mapping[int, int], base: Mapping[int, int]) -> float:
    """Kolmogorov–Smirnov distance of two distributions given as counts by length."""
    lengths = sorted(variant.keys() | base.keys())
    shares = [np.cumsum([counts.get(length, 0) for length in lengths]) for counts in (variant, base)]
    return float(np.abs(shares[0] / shares[0][-1] - shares[1] / shares[1][-1]).max())


def in_regime(off_policy_share: float, over_three_versions: float) -> bool:
    """Whether staleness is large enough for a meaningful comparison."""
    return off_policy_share >= OFF_POLICY and over_three_versions >= OVER_THREE


def run_metrics(folder: Path) -> Row:
    """Results of a finished run. Shares are of tokens, over all steps; `lengths` counts trained samples."""
    steps, evaluations = read_rows(folder / "steps.jsonl"), read_rows(folder / "evaluations.jsonl")
    tokens = sum(row["delivered_tokens"] for row in steps)
    drifts = [row["kv_drift"] for row in steps if row["kv_drift"] is not None]
    return {
        "reward_before": evaluations[0]["reward"],
        "reward_final": final_reward(evaluations),
        "reward_se": evaluations[-1]["reward_se"],
        "samples": steps[-1]["samples_so_far"],
        "seconds": steps[-1]["seconds_so_far"],
        "delivered_tokens": tokens,
        "delivered_tokens_per_s": tokens / sum(row["generate_s"] for row in steps),
        **regime_of(steps),
        "hybrid_share": sum(row["hybrid_share"] * row["delivered_tokens"] for row in steps) / tokens,
        "kv_drift": sum(drifts) / len(drifts) if drifts else None,
        "lengths": dict(sorted(Counter(length for row in steps for length in row["lengths"]).items())),
        "evaluations": [
            {name: row[name] for name in ("step", "samples_so_far", "seconds_so_far", "reward", "reward_se")}
            for row in evaluations
        ],
    }


def regime_of(steps: list[Row]) -> dict[str, float]:
    """Share of tokens drawn by an older policy, and of samples drawn over three versions or more."""
    tokens, samples = (sum(row[name] for row in steps) for name in ("delivered_tokens", "samples"))
    return {
        "off_policy_share": sum(row["off_policy_share"] * row["delivered_tokens"] for row in steps) / tokens,
        "over_three_versions": sum(row["over_three_versions"] * row["samples"] for row in steps) / samples,
    }
