"""Loss statistics against NumPy over the same tokens, merged in any order; engine-provided π_old."""

import math

import numpy as np
import pytest
import torch

from tests.bridge.test_losses import LENGTHS, case, tensors
from trainer_bridge.batch import KEPT, PROVENANCE, Tokens
from trainer_bridge.corrections import engine_proximal
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.loss_stats import MIN_CORRELATION_SEQUENCES, LossStats
from trainer_bridge.losses import policy_loss

SETTINGS = LossSettings(algorithm="dapo", correction="icepop", proximal="trainer", icepop_low=0.7, icepop_high=1.4)


def counted(*seeds: int) -> LossStats:
    stats = LossStats()
    for seed in seeds:
        now, tokens = tensors(case(seed), "token")
        stats.add(tokens, policy_loss(now, tokens, SETTINGS)[1])
    return stats


def test_every_statistic_equals_its_numpy_value() -> None:
    c = case(0)
    used = np.concatenate(c["masks"])
    flat = {
        name: np.concatenate(c[name])[used] for name in ("behaviour", "proximal", "now", "ages", "kv", "advantages")
    }
    ratio = np.exp(flat["now"] - flat["proximal"])
    weight = np.exp(flat["proximal"] - flat["behaviour"])
    a = flat["advantages"]
    clipped = ((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio < 0.8))
    on_policy = (flat["ages"] == 0) & (flat["kv"] != KEPT)
    row = counted(0).row()
    expected = {
        "tokens": used.sum(),
        "ratio_mean": ratio.mean(),
        "ratio_std": ratio.std(),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "weight_mean": weight.mean(),
        "kl": (ratio - 1 - np.log(ratio)).mean(),
        "behaviour_kl": (weight - 1 - np.log(weight)).mean(),
        "clip_share": clipped.mean(),
        "mask_share": ((weight < 0.7) | (weight > 1.4)).mean(),
        "off_policy_share": (flat["ages"] > 0).mean(),
        "hybrid_share": ((flat["ages"] == 0) & (flat["kv"] == KEPT)).mean(),
        "age_mean": flat["ages"].mean(),
        "on_policy_gap": np.abs(flat["now"] - flat["behaviour"])[on_policy].max(),
        **{f"tokens_of_age_{age}": (flat["ages"] == age).sum() for age in range(4)},
        **{f"tokens_{kv}": (flat["kv"] == k).sum() for k, kv in enumerate(PROVENANCE)},
    }
    oldest = [ages[mask].max() for ages, mask in zip(c["ages"], c["masks"], strict=True) if mask.any()]
    advantage = [x[0] for x, mask in zip(c["advantages"], c["masks"], strict=True) if mask.any()]
    expected["advantage_age_correlation"] = np.corrcoef(oldest, advantage)[0, 1]
    assert len(oldest) < len(LENGTHS)
    assert 0 < row["mask_share"] < 1
    assert row == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-6)


def test_merged_statistics_equal_those_of_all_tokens() -> None:
    whole, first, second = counted(1, 2, 3), counted(1), counted(2, 3)
    first.merge(second)
    assert first.row() == pytest.approx(whole.row())


def test_step_without_tokens_has_no_statistics() -> None:
    now, tokens = tensors(case(0), "token")
    fields = {name: getattr(tokens, name) for name in tokens.__slots__}
    empty = Tokens(**{**fields, "weights": torch.zeros_like(tokens.weights)})
    stats = LossStats()
    stats.add(empty, policy_loss(now, empty, SETTINGS)[1])
    assert stats.row() == {}
    assert stats.warnings() == []


def warned_names(responses: int, gap: float, advantage: float) -> list[str]:
    """Names in the warnings for responses of two tokens whose log ratio is `gap`; advantage rises with age."""
    n = responses
    age = torch.arange(n) % 4
    behaviour = torch.full((2 * n,), -1.0)
    tokens = Tokens(
        behaviour=behaviour,
        proximal=behaviour,
        advantages=(advantage * age).repeat_interleave(2).float(),
        weights=torch.full((2 * n,), 1 / (2 * n)),
        sequence=torch.arange(n).repeat_interleave(2),
        age=age.repeat_interleave(2),
        kv=torch.zeros(2 * n, dtype=torch.int8),
        count=n,
    )
    stats = LossStats()
    stats.add(tokens, policy_loss(behaviour + gap, tokens, LossSettings())[1])
    return [sentence.split()[0] for sentence in stats.warnings()]


def test_warnings_name_the_values_outside_their_ranges() -> None:
    assert warned_names(8, 0.0, 1.0) == []
    assert warned_names(8, math.log(1.5), 1.0) == ["ratio_mean", "clip_share", "on_policy_gap"]
    assert warned_names(MIN_CORRELATION_SEQUENCES, 0.0, 1.0) == ["advantage_age_correlation"]
    assert warned_names(MIN_CORRELATION_SEQUENCES, 0.0, 0.0) == []


def test_engine_provides_proximal_logprobs_of_some_tokens() -> None:
    """The trainer is at version 5; the tokens are of versions 3, 5 and 5, the last on kept KV."""
    behaviour = np.array([-1.0, -2.0, -3.0], np.float32)
    recomputed = np.array([-1.5, -2.0, np.nan], np.float32)
    age, kv = np.array([2, 0, 0]), np.array([0, 1, KEPT])

    def known(values: np.ndarray | None, version: int | None) -> list[float]:
        return engine_proximal(behaviour, values, version, age, kv, 5).tolist()

    assert known(recomputed, 5) == pytest.approx([-1.5, -2.0, math.nan], nan_ok=True)
    assert known(recomputed, 4) == pytest.approx([math.nan, -2.0, math.nan], nan_ok=True)
    assert known(None, None) == pytest.approx([math.nan, -2.0, math.nan], nan_ok=True)
