"""The statistics of `bench.learning`: paired differences over seeds, distances of lengths, costs to a target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

MARGIN = 0.02
"""Of held-out reward: ours is not inferior if it loses less than that, with 97.5 % confidence."""
CONFIDENCE = 0.95
LAST = 5
"""A run's held-out reward is the mean of so many last evaluations."""
OFF_POLICY = 0.4
OVER_THREE = 0.2
"""The regime in which corrections matter: at least so many tokens off-policy, so many samples over ≥ 3 versions."""


@dataclass(frozen=True)
class Paired:
    """Differences of two variants on the same seeds. `low` and `high`: the 95 % interval of the mean, by t."""

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


def paired(ours: Mapping[int, float], base: Mapping[int, float]) -> Paired | None:
    """Differences variant − base over the seeds that both have; None without any."""
    seeds = sorted(ours.keys() & base.keys())
    differences = np.array([ours[seed] - base[seed] for seed in seeds])
    if not seeds:
        return None
    mean = float(differences.mean())
    if len(seeds) < 2:
        return Paired(1, mean, None, None)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(seeds) - 1) * differences.std(ddof=1) / len(seeds) ** 0.5)
    return Paired(len(seeds), mean, mean - reach, mean + reach)


def final_reward(evaluations: Sequence[Mapping[str, Any]]) -> float:
    """Mean held-out reward of the last evaluations, the one before training left out."""
    return float(np.mean([row["reward"] for row in evaluations if row["step"] > 0][-LAST:]))


def reward_at(samples: Sequence[float], evaluations: Sequence[Mapping[str, Any]]) -> float:
    """Mean held-out reward at these numbers of delivered samples, linear between evaluations: for variants whose steps
    deliver more than others'."""
    seen, rewards = ([row[key] for row in evaluations] for key in ("samples_so_far", "reward"))
    return float(np.interp(samples, seen, rewards).mean())


def cost_to(target: float, evaluations: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """`samples_so_far` or `seconds_so_far` when held-out reward first reached the target, linear between evaluations;
    None if it never did."""
    before: Mapping[str, Any] | None = None
    for row in evaluations:
        if row["reward"] >= target:
            if before is None:
                return float(row[key])
            share = (target - before["reward"]) / (row["reward"] - before["reward"])
            return float(before[key] + share * (row[key] - before[key]))
        before = row
    return None


def ks_distance(ours: Mapping[int, int], base: Mapping[int, int]) -> float:
    """Kolmogorov–Smirnov: the largest distance of two distribution functions, each a count by length."""
    lengths = sorted(ours.keys() | base.keys())
    shares = [np.cumsum([counts.get(length, 0) for length in lengths]) for counts in (ours, base)]
    return float(np.abs(shares[0] / shares[0][-1] - shares[1] / shares[1][-1]).max())


def in_regime(off_policy_share: float, over_three_versions: float) -> bool:
    """Whether staleness is great enough for the comparison to say anything."""
    return off_policy_share >= OFF_POLICY and over_three_versions >= OVER_THREE
