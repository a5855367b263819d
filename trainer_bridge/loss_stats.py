"""Statistics of the tokens of a step, with warnings: ratios, clipping, masking and staleness.

They are kept as sums, so that the result is independent of the order of micro-batches and ranks.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer_bridge.batch import KEPT, PROVENANCE, Tokens
from trainer_bridge.corrections import LOG_LIMIT
from trainer_bridge.losses import LossTerms

Row = dict[str, float]

EXPECTED_RANGES: dict[str, tuple[float, float]] = {
    "ratio_mean": (0.8, 1.25),
    "weight_mean": (0.5, 2.0),
    "clip_share": (0.0, 0.3),
    "mask_share": (0.0, 0.5),
    "advantage_age_correlation": (-0.3, 0.3),
    "on_policy_gap": (0.0, 0.05),
}
"""A value outside its range causes a warning."""
MIN_CORRELATION_SEQUENCES = 64
"""A correlation over fewer responses is not significant."""


def _zeros() -> dict[str, float]:
    return defaultdict(float)


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.double().clamp(-LOG_LIMIT, LOG_LIMIT)


@dataclass(slots=True)
class LossStats:
    """Sums over the tokens in the loss of a step."""

    sums: dict[str, float] = field(default_factory=_zeros)
    peaks: dict[str, float] = field(default_factory=dict)
    """Maxima."""
    by_age: Counter[int] = field(default_factory=Counter)
    by_kv: Counter[str] = field(default_factory=Counter)

    def add(self, tokens: Tokens, terms: LossTerms) -> None:
        """Add a micro-batch."""
        used = terms.used
        if not used.any():
            return
        age, kv = tokens.age[used], tokens.kv[used]
        ratio, log_weight = _bounded(terms.log_ratio[used]), _bounded(terms.log_weight[used])
        on_policy = (age == 0) & (kv != KEPT)
        for name, values in (
            ("tokens", used[used]),
            ("clipped", terms.clipped[used]),
            ("masked", terms.weight[used] == 0),
            ("stale", age > 0),
            ("hybrid", (age == 0) & (kv == KEPT)),
            ("age", age),
            ("ratio", ratio.exp()),
            ("ratio_squared", (2 * ratio).exp()),
            ("weight", log_weight.exp()),
            # k3 of arXiv 2402.03300, eq. 4: unbiased for KL(π_old ‖ π) where π_old drew the token.
            ("kl", ratio.expm1() - ratio),
            ("behaviour_kl", log_weight.expm1() - log_weight),
        ):
            self.sums[name] += float(values.sum())
        self._peak("ratio_max", ratio.max().exp())
        self._peak("inverse_ratio_max", (-ratio).max().exp())
        if on_policy.any():
            self._peak("on_policy_gap", terms.gap[used][on_policy].abs().max())
        self.by_age += Counter({int(a): int(n) for a, n in zip(*age.unique(return_counts=True), strict=True)})
        self.by_kv += Counter({PROVENANCE[k]: int((kv == k).sum()) for k in range(len(PROVENANCE))})
        self._add_sequences(tokens, used)

    def _add_sequences(self, tokens: Tokens, used: Tensor) -> None:
        """Sums for the correlation of a response's advantage with the age of its oldest token."""
        x = torch.full((tokens.count,), -1.0, dtype=torch.float64, device=used.device)
        x.scatter_reduce_(0, tokens.sequence[used], tokens.age[used].double(), "amax")
        y = torch.zeros_like(x).scatter_reduce_(
            0, tokens.sequence[used], tokens.advantages[used].double(), "mean", include_self=False
        )
        x, y = x[x >= 0], y[x >= 0]
        for name, values in (
            ("n", torch.ones_like(x)),
            ("x", x),
            ("y", y),
            ("xx", x * x),
            ("yy", y * y),
            ("xy", x * y),
        ):
            self.sums[name] += float(values.sum())

    def _peak(self, name: str, value: Tensor) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0.0), float(value))

    def merge(self, other: "LossStats") -> None:
        """Add the statistics of another rank."""
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value in other.peaks.items():
            self.peaks[name] = max(self.peaks.get(name, 0.0), value)
        self.by_age.update(other.by_age)
        self.by_kv.update(other.by_kv)

    def row(self) -> Row:
        """The statistics by name; empty if there are no tokens."""
        s, count = self.sums, self.sums["tokens"]
        if not count:
            return {}
        mean = s["ratio"] / count
        return {
            "tokens": count,
            "ratio_mean": mean,
            "ratio_std": math.sqrt(max(s["ratio_squared"] / count - mean**2, 0.0)),
            "ratio_max": self.peaks["ratio_max"],
            "ratio_min": 1 / self.peaks["inverse_ratio_max"],
            "weight_mean": s["weight"] / count,
            "kl": s["kl"] / count,
            "behaviour_kl": s["behaviour_kl"] / count,
            "clip_share": s["clipped"] / count,
            "mask_share": s["masked"] / count,
            "off_policy_share": s["stale"] / count,
            "hybrid_share": s["hybrid"] / count,
            "age_mean": s["age"] / count,
            "on_policy_gap": self.peaks.get("on_policy_gap", 0.0),
            "advantage_age_correlation": self._correlation(),
            **{f"tokens_of_age_{age}": float(n) for age, n in sorted(self.by_age.items())},
            **{f"tokens_{kv}": float(self.by_kv[kv]) for kv in PROVENANCE},
        }

    def _correlation(self) -> float:
        """Pearson correlation over responses; 0 if one of the variables is constant."""
        s, n = self.sums, self.sums["n"]
        spread = (s["xx"] - s["x"] ** 2 / n) * (s["yy"] - s["y"] ** 2 / n)
        return (s["xy"] - s["x"] * s["y"] / n) / math.sqrt(spread) if spread > 1e-12 else 0.0

    def warnings(self) -> list[str]:
        """One sentence for each value outside its range."""
        row = self.row()
        warnings = []
        for name, (low, high) in EXPECTED_RANGES.items():
            if not row or (name == "advantage_age_correlation" and self.sums["n"] < MIN_CORRELATION_SEQUENCES):
                continue
            if not low <= row[name] <= high:
                warnings.append(f"{name} is {row[name]:.3g}, outside {low:g} to {high:g}")
        return warnings
