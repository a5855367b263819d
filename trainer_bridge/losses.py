"""Step 7 of 9 (train): policy losses over flat response tokens, pure torch.

μ is the behaviour policy that drew a token, π_old the proximal policy (the one that the step starts from), π the
current one; r = π/π_old is clipped, w = π_old/μ corrects for staleness (`corrections.py`) and carries no gradient.

- `grpo`: −min(r·A, clip(r, 1−ε, 1+ε)·A), mean over each response, then over responses. arXiv 2402.03300, eq. 3, no KL.
- `dapo`: the same with ε_low ≠ ε_high, mean over all tokens. arXiv 2503.14476, eq. 8.
- `gspo`: as grpo with r = exp(mean over the response of log π/π_old). arXiv 2507.18071, eq. 5 to 7.
- `ppo`: as grpo with an advantage per token that the caller gives, mean over all tokens. arXiv 1707.06347, eq. 7.
- `reinforce`: −A·log π, mean over all tokens. Williams 1992.
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
class Terms:
    """What a loss was made of, without gradient, [T] each; meaningless where `used` is false."""

    used: Tensor
    """bool: not masked before."""
    log_ratio: Tensor
    """log π/π_old of the token itself (also with GSPO)."""
    log_weight: Tensor
    """log w = log π_old/μ, before the correction bounds it."""
    gap: Tensor
    """log π − log μ."""
    weight: Tensor
    """What the correction multiplied the token's loss by; 0: masked by it."""
    clipped: Tensor
    """bool: the clip holds, so that the token has no gradient."""


def policy_loss(logprobs: Tensor, tokens: Tokens, settings: LossSettings) -> tuple[Tensor, Terms]:
    """The loss of one micro-batch, a scalar; the step's loss is the sum over all its micro-batches.

    `logprobs`: float32 [T], log π of the response tokens with gradient. Tokens of weight 0 contribute neither value nor
    gradient, whatever stands in their other fields, NaN included.
    """
    used = tokens.weights > 0
    now = logprobs.detach()
    old = _proximal(now, tokens, settings)
    log_ratio = torch.where(used, logprobs - old, 0.0)
    log_weight = torch.where(used, old - tokens.behaviour, 0.0)
    weight = correct(settings, log_weight, used, tokens)
    advantages = torch.where(used, tokens.advantages, 0.0)
    if settings.algorithm == "reinforce":
        each = -advantages * torch.where(used, logprobs, 0.0)
        clipped = torch.zeros_like(used)
    else:
        surrogate = sequence_mean(log_ratio, used, tokens) if settings.algorithm == "gspo" else log_ratio
        each, clipped = _clipped(bounded_exp(surrogate), advantages, settings.clip_range)
    loss = (each * weight * torch.where(used, tokens.weights, 0.0)).sum()
    gap = torch.where(used, now - tokens.behaviour, 0.0)
    return loss, Terms(used, log_ratio.detach(), log_weight, gap, weight, clipped & used)


def _proximal(now: Tensor, tokens: Tokens, settings: LossSettings) -> Tensor:
    if settings.proximal == "behaviour":
        return tokens.behaviour
    if settings.proximal == "loglinear":
        return loglinear_proximal(now, tokens.behaviour, tokens.age)
    return tokens.proximal


def _clipped(ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r)·A), and where the clip took the gradient."""
    low, high = clip_range
    free, held = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return -torch.minimum(free, held), (held < free).detach()


def token_weights(masks: Sequence[np.ndarray], mean: Mean) -> list[np.ndarray]:
    """Each token's share in a step's loss, float32, from the loss masks (bool) of all responses of the step.

    `token`: 1 / (unmasked tokens of the step). `response`: 1 / (unmasked tokens of the response × responses that have
    any). Made once for the whole step, over all its micro-batches and ranks, so that how it is cut changes nothing.
    """
    lengths = np.array([np.count_nonzero(mask) for mask in masks])
    if not lengths.sum():
        return [np.zeros(len(mask), np.float32) for mask in masks]
    if mean == "token":
        scale = np.full(len(masks), 1.0 / lengths.sum())
    else:
        scale = 1.0 / (np.maximum(lengths, 1) * np.count_nonzero(lengths))
    return [mask.astype(np.float32) * np.float32(each) for mask, each in zip(masks, scale, strict=True)]


def group_advantages(rewards: np.ndarray, *, normalise: bool = True) -> np.ndarray:
    """A = (r − mean) / (std + 1e-6) within a group, float64 [n] (arXiv 2402.03300, 4.1.2; std of the sample, n − 1).

    NaN is a sample without a reward: left out of mean and std, and given 0 (the caller masks it). `normalise: false`
    leaves the division out (arXiv 2503.20783). All zeros when fewer than two samples have a reward.
    """
    scored = ~np.isnan(rewards)
    if np.count_nonzero(scored) < 2:
        return np.zeros(len(rewards))
    centred = np.where(scored, rewards - rewards[scored].mean(), 0.0)
    return centred / (rewards[scored].std(ddof=1) + 1e-6) if normalise else centred


def overlong_penalty(length: int, longest: int, cache: int) -> float:
    """DAPO's soft punishment, added to the reward (arXiv 2503.14476, eq. 13).

    0 up to `longest − cache` tokens, then falling to −1 at `longest`, and −1 beyond.
    """
    if cache <= 0:
        return 0.0 if length <= longest else -1.0
    return float(np.clip((longest - cache - length) / cache, -1.0, 0.0))
