"""Step 7 of 9 (train): how tokens that an older policy drew are weighed, and where π_old comes from.

w = π_old/μ per token, without gradient. A correction multiplies the token's loss by:

- `none`: 1.
- `tis`: clamp(w, low, high). Truncated importance sampling (Ionides 2008), as slime, OpenRLHF and NeMo-RL have it.
- `icepop`: w where low ≤ w ≤ high, else 0. Ring-1T, arXiv 2510.18855.
- `seq_mask`: clamp(w, the bounds of tis) where the response's geometric mean of w is within its own bounds, else 0.
  OpenRLHF's seq-mask-tis.
- `mask_stale`: 1 where the trainer's version drew the token, else 0. slime's `mask_offpolicy_in_partial_rollout`.
- `decoupled`: w. Decoupled PPO, arXiv 2110.00641; AReaL, arXiv 2505.24298.

What is masked so stays in the denominator of the loss's mean: a step that masks much is a small step.

The proximal policy π_old is:

- `behaviour`: μ, so r compares with the policy that drew the token; costs nothing.
- `trainer`: the trainer's own forward before the step's first update.
- `engine`: where known, the engine's recompute under the trainer's version, or the logprob that this version drew the
  token with; a forward for the rest.
- `loglinear`: log μ + α(log π − log μ), α = age / (age + 1); costs nothing. AReaL, arXiv 2512.06547.
"""

import numpy as np
import torch
from torch import Tensor

from trainer_bridge.batch import KEPT, Tokens
from trainer_bridge.loss_settings import LossSettings

LOG_LIMIT = 20.0
"""|log ratio| beyond this counts as this: exp stays finite in float32, also multiplied with another one."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, finite whatever the policies think of a token; no gradient beyond the limit."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def correct(settings: LossSettings, log_weight: Tensor, used: Tensor, tokens: Tokens) -> Tensor:
    """What each token's loss is multiplied by, float32 [T]."""
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
    whole = bounded_exp(sequence_mean(log_weight, used, tokens))
    return truncated * _within(whole, settings.seq_mask_low, settings.seq_mask_high)


def _within(weight: Tensor, low: float, high: float) -> Tensor:
    return ((weight >= low) & (weight <= high)).to(weight.dtype)


def sequence_mean(values: Tensor, used: Tensor, tokens: Tokens) -> Tensor:
    """Each response's mean over its used tokens, at all of its tokens, [T]; with gradient."""
    sums = values.new_zeros(tokens.count).index_add(0, tokens.sequence, torch.where(used, values, 0.0))
    counts = values.new_zeros(tokens.count).index_add(0, tokens.sequence, used.to(values.dtype))
    return (sums / counts.clamp(min=1.0))[tokens.sequence]


def loglinear_proximal(now: Tensor, behaviour: Tensor, age: Tensor) -> Tensor:
    """log π_old between log μ and log π, by how far the versions lie apart: v_π = v_old + 1, age = v_old − v_μ."""
    share = age / (age + 1)
    return behaviour + share * (now - behaviour)


def engine_proximal(
    behaviour: np.ndarray,
    recomputed: np.ndarray | None,
    recomputed_version: int | None,
    age: np.ndarray,
    kv: np.ndarray,
    version: int,
) -> np.ndarray:
    """π_old of one response as far as the engine knows it, float32 [len]; NaN where a forward must tell.

    Tokens that the trainer's version drew on KV of its own are their own proximal; older ones are known from a
    recompute under that version (S7); tokens on kept KV are of no single policy.
    """
    known = np.where((age == 0) & (kv != KEPT), behaviour, np.float32("nan")).astype(np.float32)
    if recomputed is None or recomputed_version != version:
        return known
    return np.where(np.isnan(known) & (age > 0), recomputed, known).astype(np.float32)
