"""Losses against independent references, computed one token at a time, with masks and mixed versions."""

import math
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch

from trainer_bridge.batch import Tokens
from trainer_bridge.loss_settings import Algorithm, Correction, LossSettings, Mean, Proximal
from trainer_bridge.losses import group_advantages, overlong_penalty, policy_loss, token_weights

LENGTHS = [5, 1, 9, 12, 3, 7]
Case = dict[str, Any]


def case(seed: int, spread: float = 0.4) -> Case:
    """Six responses with masked tokens, one of them masked entirely, ages 0 to 3 and every provenance."""
    rng = np.random.default_rng(seed)
    behaviour = [-rng.exponential(1.5, n) for n in LENGTHS]
    proximal = [b + spread * rng.standard_normal(len(b)) for b in behaviour]
    now = [p + spread * rng.standard_normal(len(p)) for p in proximal]
    masks = [rng.random(n) > 0.2 for n in LENGTHS]
    masks[4][:] = False
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        "now": now,
        "masks": masks,
        "ages": [np.sort(rng.integers(0, 4, n))[::-1].copy() for n in LENGTHS],
        "kv": [rng.integers(0, 3, n) for n in LENGTHS],
        "advantages": [np.full(n, a) for n, a in zip(LENGTHS, rng.standard_normal(len(LENGTHS)), strict=True)],
    }


def tensors(c: Case, mean: Mean) -> tuple[torch.Tensor, Tokens]:
    """The case in float64, as the loss reads it."""

    def flat(name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(c[name]).astype(np.float64))

    weights = np.concatenate(token_weights(c["masks"], mean)).astype(np.float64)
    sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    tokens = Tokens(
        behaviour=flat("behaviour"),
        proximal=flat("proximal"),
        advantages=flat("advantages"),
        weights=torch.from_numpy(weights),
        sequence=torch.from_numpy(sequence),
        age=flat("ages").long(),
        kv=flat("kv").to(torch.int8),
        count=len(LENGTHS),
    )
    return flat("now").requires_grad_(), tokens


# --- references: loops over scalars, written from the papers and independent of the code under test


def reference_old(c: Case, i: int, t: int, source: Proximal) -> float:
    mu, now, age = c["behaviour"][i][t], c["now"][i][t], c["ages"][i][t]
    if source == "behaviour":
        return mu
    if source == "loglinear":
        alpha = (10 - (10 - age)) / (11 - (10 - age))  # (v_prox − v_beh) / (v_θ − v_beh), v_prox = 10
        return mu + alpha * (now - mu)
    return c["proximal"][i][t]


def reference_weight(c: Case, i: int, t: int, kept: list[int], s: LossSettings) -> float:
    def w(t: int) -> float:
        return math.exp(reference_old(c, i, t, s.proximal) - c["behaviour"][i][t])

    if s.correction == "none":
        return 1.0
    if s.correction == "mask_stale":
        return 0.0 if c["ages"][i][t] > 0 else 1.0
    if s.correction == "decoupled":
        return w(t)
    if s.correction == "tis":
        return min(max(w(t), s.tis_clip_low), s.tis_clip)
    if s.correction == "icepop":
        return w(t) if s.icepop_low <= w(t) <= s.icepop_high else 0.0
    geometric = math.prod(w(k) for k in kept) ** (1 / len(kept))
    inside = s.seq_mask_low <= geometric <= s.seq_mask_high
    return min(max(w(t), s.tis_clip_low), s.tis_clip) if inside else 0.0


def reference_loss(c: Case, s: LossSettings) -> float:
    kept = [[t for t in range(n) if mask[t]] for n, mask in zip(LENGTHS, c["masks"], strict=True)]
    responses, tokens = sum(1 for k in kept if k), sum(map(len, kept))
    low, high = s.clip_range
    total = 0.0
    for i, chosen in enumerate(kept):
        for t in chosen:
            a, now = c["advantages"][i][t], c["now"][i][t]
            if s.algorithm == "gspo":
                gaps = [c["now"][i][k] - reference_old(c, i, k, s.proximal) for k in chosen]
                r = math.exp(sum(gaps) / len(gaps))
            else:
                r = math.exp(now - reference_old(c, i, t, s.proximal))
            each = -a * now if s.algorithm == "reinforce" else -min(r * a, min(max(r, 1 - low), 1 + high) * a)
            scale = 1 / tokens if s.mean_over == "token" else 1 / (len(chosen) * responses)
            total += each * reference_weight(c, i, t, chosen, s) * scale
    return total


SETTINGS = [
    LossSettings(algorithm=a, correction=c, proximal=p, seq_mask_low=0.8, seq_mask_high=1.3, tis_clip_low=0.6, mean=m)
    for a in get_args(Algorithm)
    for c in get_args(Correction)
    for p in get_args(Proximal)
    for m in (None, *get_args(Mean))
    if p != "behaviour" or c in ("none", "mask_stale")
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: f"{s.algorithm}-{s.correction}-{s.proximal}-{s.mean}")
def test_every_loss_with_every_correction_equals_its_reference(settings: LossSettings) -> None:
    for seed in range(3):
        c = case(seed)
        now, tokens = tensors(c, settings.mean_over)
        loss, _ = policy_loss(now, tokens, settings)
        assert float(loss.detach()) == pytest.approx(reference_loss(c, settings), rel=1e-6)


def frozen_reference(c: Case, s: LossSettings, moved: np.ndarray) -> float:
    """The reference after a small change of log π, with π_old fixed, because it has no gradient."""
    fixed = {**c, "proximal": [[reference_old(c, i, t, s.proximal) for t in range(n)] for i, n in enumerate(LENGTHS)]}
    fixed["now"] = np.split(np.concatenate(c["now"]) + moved, np.cumsum(LENGTHS)[:-1])
    return reference_loss(fixed, msgspec.structs.replace(s, proximal="trainer"))


@pytest.mark.parametrize(
    "settings", [s for s in SETTINGS if s.mean is None], ids=lambda s: f"{s.algorithm}-{s.correction}-{s.proximal}"
)
def test_every_gradient_equals_the_reference_differentiated_numerically(settings: LossSettings) -> None:
    c = case(7)
    now, tokens = tensors(c, settings.mean_over)
    policy_loss(now, tokens, settings)[0].backward()
    step = 1e-6
    for t in range(len(now)):
        moved = np.zeros(len(now))
        moved[t] = step
        slope = (frozen_reference(c, settings, moved) - frozen_reference(c, settings, -moved)) / (2 * step)
        assert float(now.grad[t]) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("settings", SETTINGS[::3], ids=lambda s: f"{s.algorithm}-{s.correction}-{s.proximal}")
def test_loss_and_gradient_are_finite_for_extreme_ratios_and_garbage_in_masked_tokens(settings: LossSettings) -> None:
    """Log ratios of ±10⁴ in float32; masked tokens contain NaN and infinities."""
    rng = np.random.default_rng(1)
    now, tokens = tensors(case(3, spread=1e4), settings.mean_over)
    now = now.detach().float()
    fields = {name: getattr(tokens, name) for name in tokens.__slots__}
    for name in ("behaviour", "proximal", "advantages"):
        fields[name] = fields[name].float()
    for values in (now, fields["behaviour"], fields["proximal"], fields["advantages"]):
        values[tokens.weights == 0] = float(rng.choice([np.nan, np.inf, -np.inf]))
    fields["weights"] = tokens.weights.float()
    loss, _ = policy_loss(now.requires_grad_(), Tokens(**fields), settings)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(now.grad).all()
    assert not now.grad[tokens.weights == 0].any()


@pytest.mark.parametrize("mean", get_args(Mean))
def test_loss_is_independent_of_the_split_into_micro_batches(mean: Mean) -> None:
    settings = LossSettings(algorithm="gspo", correction="seq_mask", proximal="trainer", mean=mean, seq_mask_low=0.8)
    now, tokens = tensors(case(5), mean)
    whole, _ = policy_loss(now, tokens, settings)
    parts = []
    for chosen in ([0, 3], [1, 2, 4, 5]):
        at = torch.isin(tokens.sequence, torch.tensor(chosen))
        fields = {n: getattr(tokens, n)[at] for n in tokens.__slots__ if n != "count"}
        fields["sequence"] = torch.searchsorted(torch.tensor(chosen), fields["sequence"])
        parts.append(policy_loss(now[at], Tokens(**fields, count=len(chosen)), settings)[0])
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-12)


def test_clipped_marks_the_tokens_without_gradient() -> None:
    settings = LossSettings(algorithm="dapo", proximal="trainer")
    now, tokens = tensors(case(2), "token")
    loss, terms = policy_loss(now, tokens, settings)
    loss.backward()
    assert terms.clipped.any()
    assert terms.clipped.equal(terms.used & (now.grad == 0))


def test_token_weights_sum_to_one_and_skip_fully_masked_responses() -> None:
    masks = [np.array([True, False, True]), np.zeros(4, bool), np.ones(1, bool)]
    by_response, by_token = token_weights(masks, "response"), token_weights(masks, "token")
    np.testing.assert_allclose(np.concatenate(by_response), [0.25, 0, 0.25, 0, 0, 0, 0, 0.5])
    np.testing.assert_allclose(np.concatenate(by_token), np.array([1, 0, 1, 0, 0, 0, 0, 1]) / 3)
    assert not np.concatenate(token_weights([np.zeros(3, bool)], "response")).any()


def test_baseline_excludes_samples_without_a_reward() -> None:
    rewards = np.array([1.0, 0.0, np.nan, 1.0, 0.5])
    scored = np.array([1.0, 0.0, 1.0, 0.5])
    expected = (scored - 0.625) / (np.sqrt(((scored - 0.625) ** 2).sum() / 3) + 1e-6)
    got = group_advantages(rewards)
    np.testing.assert_allclose(got[[0, 1, 3, 4]], expected)
    assert got[2] == 0
    np.testing.assert_allclose(group_advantages(rewards, normalise=False)[[0, 1, 3, 4]], scored - 0.625)
    assert not group_advantages(np.array([np.nan, 3.0, np.nan])).any()
    assert not group_advantages(np.full(4, 0.7)).any()


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12288, 0.0), (14336, -0.5), (16383, -4095 / 4096), (16384, -1.0), (20000, -1.0)]
)
def test_overlong_penalty_rises_linearly(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=16384, buffer=4096) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"algorithm": "grpi"}, "algorithm"),
        ({"correction": "tiss"}, "correction"),
        ({"proximal": "old"}, "proximal"),
        ({"mean": "group"}, "mean"),
        ({"correction": "tis"}, "makes them equal"),
        ({"correction": "tis", "proximal": "trainer", "tis_clip_low": 3.0}, "tis_clip_low"),
        ({"correction": "icepop", "proximal": "trainer", "icepop_low": -1.0}, "icepop_low"),
        ({"eps_clip": -0.1}, "eps_clip"),
    ],
)
def test_invalid_loss_settings_are_refused(fields: Case, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LossSettings(**fields)


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_group_baseline_needs_complete_groups(algorithm: Algorithm) -> None:
    settings = LossSettings(algorithm=algorithm)
    settings.check_quota_unit("group")
    if algorithm in ("grpo", "dapo", "gspo"):
        with pytest.raises(ValueError, match="quota_unit: sample is refused"):
            settings.check_quota_unit("sample")
    else:
        settings.check_quota_unit("sample")
