"""Response lengths: seeded distributions scaled to a preset's mean, and the distance of a sample from one.

All are given by their inverse distribution function, so that a draw is one uniform number and the same seed gives the
same lengths everywhere. Lengths are whole tokens in [1, longest]; what would be longer is cut there, as a trainer's
``max_new_tokens`` cuts it (a trace's have been).
"""

import json
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

MEDIAN, P99 = 500.0, 5000.0
"""Lengths of a typical reasoning-RL run, from https://jiahuanglin.xyz/all_lessons/RL/lessons/22b_longtail_rollouts.html
(read 2026-11; it also describes them as log-normal). Only their ratio is used: a preset sets the mean."""
SIGMA = math.log(P99 / MEDIAN) / NormalDist().inv_cdf(0.99)
"""Log-normal: σ = ln(p99 / median) / z(0.99) = 0.99."""
PARETO_ALPHA = 1.5
"""Below 2, so the variance is infinite; above 1, so the mean exists."""
EXTREME_SHARE = 0.05
BIASED_ABOVE = 0.10
"""Kolmogorov–Smirnov distance of the delivered lengths from the source above which a row is marked biased. Eight rounds
of 96 samples exceed 0.05 in one case of twenty. For two lengths (`extreme`), the limit is half the share of the long
ones, which is three standard errors."""
GRID = 20_000


@dataclass(frozen=True)
class Lengths:
    """One distribution: `inverse` maps a uniform number in [0, 1) to a length before scaling and cutting."""

    name: str
    inverse: Callable[[float], float]
    scale: float
    longest: int
    biased_above: float = BIASED_ABOVE

    def at(self, uniform: float) -> int:
        """The length at a quantile, in tokens."""
        return min(self.longest, max(1, round(self.scale * self.inverse(uniform))))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return self.at(rng.random())

    @cached_property
    def grid(self) -> list[int]:
        """The lengths at `GRID` evenly spaced quantiles, ascending: the distribution itself."""
        return [self.at((i + 0.5) / GRID) for i in range(GRID)]

    @property
    def mean(self) -> float:
        """Mean length after cutting."""
        return sum(self.grid) / GRID

    @property
    def running_mean(self) -> float:
        """Mean final length of the samples that are running at a moment (length-biased): E[L²] / E[L]."""
        return sum(length * length for length in self.grid) / sum(self.grid)

    def distance(self, sample: Sequence[int]) -> float:
        """Kolmogorov–Smirnov distance of a sample from this distribution: the largest gap of the two step functions."""
        ordered = sorted(sample)
        if not ordered:
            return 1.0
        gaps = (
            abs(bisect_right(ordered, value) / len(ordered) - bisect_right(self.grid, value) / GRID)
            for value in {*ordered, *self.grid}
        )
        return max(gaps)


def named(name: str, mean: float, longest: int) -> Lengths:
    """A distribution by name with about this mean after cutting, or a trace file (a JSON list of lengths).

    ``extreme:R``: 95 % of the responses have `mean` tokens, and 5 % have R times as many. These and the lengths of a
    trace are not cut at `longest`.
    """
    kind, _, argument = name.partition(":")
    if kind == "extreme":
        ratio = float(argument or 100)
        return Lengths(name, _extreme(ratio), mean, round(mean * ratio), biased_above=EXTREME_SHARE / 2)
    if kind == "trace":
        lengths = sorted(json.loads(Path(argument).read_text()))
        return Lengths(name, lambda u: lengths[int(u * len(lengths))], 1.0, lengths[-1])
    if kind not in INVERSES:
        raise ValueError(f"the distribution is not one of extreme:R, trace:FILE, {', '.join(INVERSES)}")
    inverse = INVERSES[kind]
    return Lengths(name, inverse, _scale(inverse, mean, longest), longest)


def _scale(inverse: Callable[[float], float], mean: float, longest: int) -> float:
    """The factor that gives the mean after cutting, by bisection."""
    shape = [inverse((i + 0.5) / GRID) for i in range(0, GRID, 7)]
    low, high = 0.0, float(longest)
    for _ in range(60):
        middle = (low + high) / 2
        reached = sum(min(longest, max(1.0, middle * value)) for value in shape) / len(shape)
        low, high = (middle, high) if reached < mean else (low, middle)
    return high


def _lognormal(uniform: float) -> float:
    return math.exp(SIGMA * NormalDist().inv_cdf(min(max(uniform, 1e-9), 1 - 1e-9)))


def _pareto(uniform: float) -> float:
    return (1.0 - uniform) ** (-1.0 / PARETO_ALPHA)


def _extreme(ratio: float) -> Callable[[float], float]:
    return lambda uniform: 1.0 if uniform < 1.0 - EXTREME_SHARE else ratio


INVERSES: dict[str, Callable[[float], float]] = {
    "lognormal": _lognormal,
    "pareto": _pareto,
    "uniform": lambda uniform: 0.05 + 1.9 * uniform,
    "constant": lambda _: 1.0,
}
