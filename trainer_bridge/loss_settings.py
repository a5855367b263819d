"""The settings of the policy loss. Where `name=` is given, it is the name in YAML and flags."""

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

Algorithm = Literal["grpo", "dapo", "gspo", "reinforce", "ppo"]
Mean = Literal["response", "token"]
Correction = Literal["none", "tis", "icepop", "seq_mask", "mask_stale", "decoupled"]
"""Off-policy corrections, explained in `corrections.py`."""
Proximal = Literal["behaviour", "trainer", "engine", "loglinear"]
"""Sources of π_old, explained in `corrections.py`."""
NonNegative = Annotated[float, Meta(ge=0)]

GROUP_BASELINE: frozenset[Algorithm] = frozenset({"grpo", "dapo", "gspo"})
"""Algorithms whose advantage is relative to the group, so that they need whole groups."""

_CLIP: dict[Algorithm, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),  # the values of the GSPO paper (arXiv 2507.18071)
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


class LossSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The policy loss and its off-policy correction. Raises `ValueError` for settings that contradict each other."""

    algorithm: Algorithm = msgspec.field(default="grpo", name="advantage_estimator")
    """The policy loss and its advantages."""
    eps_clip: NonNegative | None = None
    """Lower clip range; None: the algorithm's default."""
    eps_clip_high: NonNegative | None = None
    """Upper clip range; None: `eps_clip` if that is set, else the algorithm's default."""
    mean: Mean | None = msgspec.field(default=None, name="loss_mean")
    """Whether the loss is averaged per response and then over responses, or over all tokens; None: the algorithm's
    default."""
    correction: Correction = "none"
    """How tokens drawn by an older policy are weighted (`corrections.py`)."""
    proximal: Proximal = "behaviour"
    """Where the logprobs of the proximal policy come from; `engine` uses the engine's recompute where available."""
    tis_clip: NonNegative = 2.0
    """Upper bound of the importance weight."""
    tis_clip_low: NonNegative = 0.0
    """Lower bound of the importance weight."""
    icepop_low: NonNegative = 0.5
    """IcePop masks tokens whose importance weight is below this."""
    icepop_high: NonNegative = 5.0
    """IcePop masks tokens whose importance weight is above this."""
    seq_mask_low: NonNegative = 0.999
    """`seq_mask` masks responses whose geometric mean weight is below this."""
    seq_mask_high: NonNegative = 1.002
    """`seq_mask` masks responses whose geometric mean weight is above this."""

    def __post_init__(self) -> None:
        for name, choices in (("algorithm", Algorithm), ("correction", Correction), ("proximal", Proximal)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {getattr(self, name)!r}")
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
        """`mean`, or the algorithm's default."""
        return self.mean or _MEAN[self.algorithm]

    def check_quota_unit(self, quota_unit: str) -> None:
        """Raises: ValueError: the algorithm needs whole groups, and rounds deliver single samples."""
        if quota_unit == "sample" and self.algorithm in GROUP_BASELINE:
            raise ValueError(f"{self.algorithm} scores a group together, so quota_unit: sample is refused; use group")
