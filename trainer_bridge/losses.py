"""Policy losses over flat response tokens, in plain torch.

μ is the behaviour policy that drew a token, π_old the proximal policy at the start of the step, and π the current
policy. The ratio r = π/π_old is clipped; w = π_old/μ corrects for staleness (`corrections.py`) and has no gradient.

- `grpo`: −min(r·A, clip(r, 1−ε, 1+ε)·A), mean over each response, then over responses. arXiv 2402.03300, eq. 3, no KL.
- `dapo`: as grpo with ε_low ≠ ε_high, mean over all tokens. arXiv 2503.14476, eq. 8.
- `gspo`: as grpo with r = exp(mean over the response of log π/π_old). arXiv 2507.18071, eq. 5 to 7.
- `ppo`: as grpo, with given advantages per token, mean over all tokens. arXiv 1707.06347, eq. 7.
- `reinforce`: −A·log π, mean over all tokens. Williams 1992.

Of a trajectory with branches, each branch is a response of its own in the mean of `gspo`, because branches may be in
different micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer_bridge.batch import Tokens
from trainer_bridge.corrections import bounded_exp, correct, loglinear_proximal, sequence_mean
from trainer_bridge.loss_settings import LossSettings, Mean


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The intermediate values of a loss, without gradient, [T] each. Undefined where `used` is false."""

    used: Tensor
    """bool: the token is in the loss."""
    log_ratio: Tensor
    """log π/π_old of the token, also for GSPO."""
    log_weight: Tensor
    """log w = log π_old/μ, before the correction."""
    gap: Tensor
    """log π − log μ."""
    weight: Tensor
    """Factor of the correction on the token's loss; 0: masked."""
    clipped: Tensor
    """bool: the clip is active, so the token has no gradient."""


def policy_loss(logprobs: Tensor, tokens: Tokens, settings: LossSettings) -> tuple[Tensor, LossTerms]:
    """The loss of one micro-batch, a scalar. The loss of a step is the sum over its micro-batches.

    `logprobs`: float32 [T], log π of the response tokens with gradient. Tokens of weight 0 contribute neither value nor
    gradient, even if their other fields are NaN.
    """
    used = tokens.weights > 0
    detached = logprobs.detach()
    old = _proximal(detached, tokens, settings)
    log_ratio = torch.where(used, logprobs - old, 0.0)
    log_weight = torch.where(used, old - tokens.behaviour, 0.0)
    weight = correct(settings, log_weight, used, tokens)
    advantages = torch.where(used, tokens.advantages, 0.0)
    if settings.algorithm == "reinforce":
        token_losses = -advantages * torch.where(used, logprobs, 0.0)
        clipped = torch.zeros_like(used)
    else:
        surrogate = sequence_mean(log_ratio, used, tokens) if settings.algorithm == "gspo" else log_ratio
        token_losses, clipped = _clipped(bounded_exp(surrogate), advantages, settings.clip_range)
    loss = (token_losses * weight * torch.where(used, tokens.weights, 0.0)).sum()
    gap = torch.where(used, detached - tokens.behaviour, 0.0)
    return loss, LossTerms(used, log_ratio.detach(), log_weight, gap, weight, clipped & used)


def _proximal(logprobs: Tensor, tokens: Tokens, settings: LossSettings) -> Tensor:
    if settings.proximal == "behaviour":
        return tokens.behaviour
    if settings.proximal == "loglinear":
        return loglinear_proximal(logprobs, tokens.behaviour, tokens.age)
    return tokens.proximal


def _clipped(ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r)·A), and a bool mask: the clip removes the token's gradient."""
    low, high = clip_range
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(unclipped, clipped), (clipped < unclipped).detach()


def token_weights(masks: Sequence[np.ndarray], mean: Mean) -> list[np.ndarray]:
    """The weight of each token in a step's loss, float32, from the loss masks (bool) of all responses of the step.

    `token`: 1 / (unmasked tokens of the step). `response`: 1 / (unmasked tokens of the response × responses that have
    any). Computed once for the whole step, so that the loss is independent of micro-batches and ranks.
    """
    lengths = np.array([np.count_nonzero(mask) for mask in masks])
    if not lengths.sum():
        return [np.zeros(len(mask), np.float32) for mask in masks]
    if mean == "token":
        scale = np.full(len(masks), 1.0 / lengths.sum())
    else:
        scale = 1.0 / (np.maximum(lengths, 1) * np.count_nonzero(lengths))
    return [mask.astype(np.float32) * np.float32(factor) for mask, factor in zip(masks, scale, strict=True)]


def group_advantages(rewards: np.ndarray, *, normalise: bool = True) -> np.ndarray:
    """A = (r − mean) / (std + 1e-6) within a group, float64 [n] (arXiv 2402.03300, 4.1.2; std of the sample, n − 1).

    NaN marks a sample without a reward: it is excluded from mean and std, and its advantage is 0 (the caller masks it).
    `normalise=False` omits the division (arXiv 2503.20783). All zeros if fewer than two samples have a reward.
    """
    scored = ~np.isnan(rewards)
    if np.count_nonzero(scored) < 2:
        return np.zeros(len(rewards))
    centred = np.where(scored, rewards - rewards[scored].mean(), 0.0)
    return centred / (rewards[scored].std(ddof=1) + 1e-6) if normalise else centred


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """DAPO's soft overlong penalty, added to the reward (arXiv 2503.14476, eq. 13).

    0 up to `max_length − buffer` tokens, then falling linearly to −1 at `max_length`.
    """
    if buffer <= 0:
        return 0.0 if length <= max_length else -1.0
    return float(np.clip((max_length - buffer - length) / buffer, -1.0, 0.0))
