"""Step 7 of 9 (train): which loss, as a trainer's configuration names it."""

from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["grpo", "dapo", "gspo", "reinforce", "ppo"]
Mean = Literal["response", "token"]
Correction = Literal["none", "tis", "icepop", "seq_mask", "mask_stale", "decoupled"]
"""What they do: `corrections.py`."""
Proximal = Literal["behaviour", "trainer", "engine", "loglinear"]

GROUP_BASELINE: frozenset[Algorithm] = frozenset({"grpo", "dapo", "gspo"})
"""They score a group together, so they need whole groups."""

_CLIP: dict[Algorithm, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),  # section 5.1 of its paper
    "ppo": (0.2, 0.2),
    "reinforce": (float("inf"), float("inf")),
}
_MEAN: dict[Algorithm, Mean] = {
    "grpo": "response",
    "dapo": "token",
    "gspo": "response",
    "ppo": "token",
    "reinforce": "token",
}


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which loss, checked when made: `ValueError` with one sentence."""

    algorithm: Algorithm = "grpo"
    eps_clip: float | None = None
    """Lower clip range; the algorithm's own by default."""
    eps_clip_high: float | None = None
    """Upper clip range; `eps_clip` where that is given, else the algorithm's own."""
    mean: Mean | None = None
    """Over what the loss is a mean; the algorithm's own by default."""
    correction: Correction = "none"
    proximal: Proximal = "behaviour"
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    icepop_low: float = 0.5
    icepop_high: float = 5.0
    seq_mask_low: float = 0.999
    seq_mask_high: float = 1.002

    def __post_init__(self) -> None:
        for name, kinds in (("algorithm", Algorithm), ("correction", Correction), ("proximal", Proximal)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, not {getattr(self, name)!r}")
        if self.mean is not None and self.mean not in get_args(Mean):
            raise ValueError(f"mean must be one of {', '.join(get_args(Mean))}, not {self.mean!r}")
        if self.proximal == "behaviour" and self.correction not in ("none", "mask_stale"):
            raise ValueError(
                f"correction {self.correction} compares the proximal policy with the behaviour policy, and proximal: "
                "behaviour makes them equal; use trainer, engine or loglinear"
            )
        for low, high in (
            ("tis_clip_low", "tis_clip"),
            ("icepop_low", "icepop_high"),
            ("seq_mask_low", "seq_mask_high"),
        ):
            if not 0 <= getattr(self, low) <= getattr(self, high):
                raise ValueError(f"0 <= {low} <= {high} must hold")
        if min(self.clip_range) < 0:
            raise ValueError("eps_clip and eps_clip_high must not be negative")

    @property
    def clip_range(self) -> tuple[float, float]:
        """ε_low and ε_high."""
        low, high = _CLIP[self.algorithm]
        if self.eps_clip is not None:
            low = high = self.eps_clip
        return low, high if self.eps_clip_high is None else self.eps_clip_high

    @property
    def mean_over(self) -> Mean:
        """Over what the loss is a mean."""
        return self.mean or _MEAN[self.algorithm]

    def check_quota_unit(self, quota_unit: str) -> None:
        """Refuse losses with a group baseline when a round delivers parts of groups."""
        if quota_unit == "sample" and self.algorithm in GROUP_BASELINE:
            raise ValueError(f"{self.algorithm} scores a group together, so quota_unit: sample is refused; use group")
