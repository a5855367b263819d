"""Off-policy corrections: the weight of tokens drawn by an older policy, and the source of π_old.

w = π_old/μ per token, without gradient. A correction multiplies the loss of a token by:

- `none`: 1.
- `tis`: clamp(w, low, high). Truncated importance sampling (Ionides 2008), as in slime, OpenRLHF and NeMo-RL.
- `icepop`: w if low ≤ w ≤ high, else 0. Ring-1T, arXiv 2510.18855.
- `seq_mask`: w clamped as for tis if the geometric mean of w over the response is within `seq_mask_low` and
  `seq_mask_high`, else 0. OpenRLHF's seq-mask-tis.
- `mask_stale`: 1 if the trainer's version drew the token, else 0. slime's `mask_offpolicy_in_partial_rollout`.
- `decoupled`: w. Decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298.

Tokens masked by a correction still count in the denominator of the loss, so masking many of them scales the step down.

The proximal policy π_old is:

- `behaviour`: μ, so that r is relative to the policy that drew the token; no extra cost.
- `trainer`: a forward of the trainer before the first update of the step.
- `engine`: the engine's recompute under the trainer's version, or the logprob with which this version drew the token;
  a forward of the trainer for tokens with neither, which with `kv: keep` are nearly all old ones.
- `loglinear`: log μ + α(log π − log μ), α = age / (age + 1); no extra cost. AReaL, arXiv 2512.06547.
"""

import numpy as np
import torch
from torch import Tensor

from trainer_bridge.batch import KEPT, Tokens
from trainer_bridge.loss_settings import LossSettings

LOG_LIMIT = 20.0
"""Log ratios are clamped to ± this, so that the product of two exponentials is finite in float32."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log ratio; no gradient beyond `LOG_LIMIT`."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def correct(settings: LossSettings, log_weight: Tensor, used: Tensor, tokens: Tokens) -> Tensor:
    """The factor on the loss of each token, float32 [T]."""
    kind = settings.correction
    if kind == "none":
        return torch.ones_like(log_weight)
    if kind == "mask_stale":
        return (tokens.age == 0).to(log_weight.dtype)
    weight = bounded_exp(log_weight)
    if kind == "decoupled":
        return weight
    if kind == "icepop":
        return weight * _within(weight, settings.icepop_low, settings.icepop_high)
    truncated = weight.clamp(settings.tis_clip_low, settings.tis_clip)
    if kind == "tis":
        return truncated
    geometric_mean = bounded_exp(sequence_mean(log_weight, used, tokens))
    return truncated * _within(geometric_mean, settings.seq_mask_low, settings.seq_mask_high)


def _within(weight: Tensor, low: float, high: float) -> Tensor:
    return ((weight >= low) & (weight <= high)).to(weight.dtype)


def sequence_mean(values: Tensor, used: Tensor, tokens: Tokens) -> Tensor:
    """The mean over the used tokens of each response, repeated for all its tokens, [T]; with gradient."""
    sums = values.new_zeros(tokens.count).index_add(0, tokens.sequence, torch.where(used, values, 0.0))
    counts = values.new_zeros(tokens.count).index_add(0, tokens.sequence, used.to(values.dtype))
    return (sums / counts.clamp(min=1.0))[tokens.sequence]


def loglinear_proximal(logprobs: Tensor, behaviour: Tensor, age: Tensor) -> Tensor:
    """log π_old, interpolated between log μ and log π by version: v_π = v_old + 1, age = v_old − v_μ."""
    alpha = age / (age + 1)
    return behaviour + alpha * (logprobs - behaviour)


def engine_proximal(
    behaviour: np.ndarray,
    recomputed: np.ndarray | None,
    recomputed_version: int | None,
    age: np.ndarray,
    kv: np.ndarray,
    version: int,
) -> np.ndarray:
    """log π_old of one response from the engine, float32 [T]; NaN where a forward of the trainer is needed.

    Tokens drawn by the trainer's version on KV of that version have their behaviour logprob. Older tokens have the
    logprob of a recompute under it (`proximal-logprobs`). Tokens on kept KV are of no single policy.
    """
    known = np.where((age == 0) & (kv != KEPT), behaviour, np.float32("nan")).astype(np.float32)
    if recomputed is None or recomputed_version != version:
        return known
    return np.where(np.isnan(known) & (age > 0), recomputed, known).astype(np.float32)
