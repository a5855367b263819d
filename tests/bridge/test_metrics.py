"""The row of a step."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_april.client.types import RolloutSummary
from tests.bridge.test_rollout import STATS
from trainer_bridge.batch import PROVENANCE
from trainer_bridge.checkpoints import LoopState
from trainer_bridge.loss_stats import LossStats
from trainer_bridge.metrics import TrainedStep, step_metrics
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.samples import TrainingSample
from trainer_bridge.trainer import SequenceStats, StepReport


@pytest.mark.parametrize(
    ("applied", "warnings"),
    [
        ([True, True], []),
        ([True, False], ["1 of 2 optimiser steps skipped: the gradient is not finite"]),
    ],
)
def test_skipped_optimiser_steps_are_warned_of(applied: list[bool], warnings: list[str]) -> None:
    rollout = ScoredRollout(RolloutSummary("r.1", "r", 1, "quota", [], {}, {**STATS, "mean_running": 1.0}))
    trained = [
        TrainedStep([], [], StepReport(0.0, 1.0 if each else math.nan, each, 1e-6, LossStats(), [], 1.0))
        for each in applied
    ]
    row = step_metrics(LoopState(step=1), 1, [rollout], [], trained)
    assert row["warnings"] == warnings
    assert row["applied"] == all(applied)


def sample(index: int, versions: list[int], kv: str, reward: float, *, drift: float = 0.0) -> TrainingSample:
    """`kv`: the provenance of each token, by its first letter. The first token of the prompt's answer is masked."""
    count = len(versions)
    behaviour = np.full(count, -1.0, np.float32)
    return TrainingSample(
        prompt_id="p",
        index=index,
        prompt_ids=np.arange(2, dtype=np.int32),
        output_ids=np.arange(count, dtype=np.int32),
        loss_mask=np.arange(count) > 0,
        behaviour=behaviour,
        version=np.array(versions),
        kv=np.array([[name[0] for name in PROVENANCE].index(letter) for letter in kv], np.int8),
        recomputed=None,
        recomputed_version=None,
        reward=reward,
        advantage=0.0,
        finish="stop",
        proximal=behaviour + np.float32(drift),
    )


def rollout(duration_s: float, running: float, timeline: list[list[float]], **stats: Any) -> ScoredRollout:
    given = {**STATS, "duration_s": duration_s, "mean_running": running, "timeline": timeline, **stats}
    return ScoredRollout(RolloutSummary("r", "r", 2, "quota", [], {"tokens": 7}, given))


def test_staleness_of_a_step() -> None:
    """Trainer at version 2. The masked first tokens count nowhere."""
    samples = [
        sample(0, [0, 0, 1, 2, 2], "ffrfk", 1.0, drift=0.5),
        sample(1, [2, 2, 2], "ffk", 0.0, drift=-0.25),
        sample(2, [1, 1, 2], "fkf", 0.5),
    ]
    row = step_metrics(LoopState(step=1), 2, [rollout(1.0, 1.0, [])], samples, [])
    assert row["tokens_by_age"] == {"0": 5, "1": 2, "2": 1}
    assert row["off_policy_share"] == 3 / 8
    assert row["hybrid_share"] == 2 / 8, "the token of version 1 on kept KV is off-policy, not hybrid"
    assert row["kv_drift"] == pytest.approx((0.5 + 0.25) / 2)
    assert row["over_three_versions"] == 1 / 3
    assert (row["staleness"], row["lengths"]) == (2, [4, 2, 2])


def test_the_engine_s_statistics_of_several_rounds_are_weighted_by_their_time() -> None:
    rounds = [
        rollout(3.0, 10.0, [[0.0, 12], [2.0, 8]], tokens_after_quota=4, reprefilled_tokens=1),
        rollout(1.0, 2.0, [[0.5, 2]], tokens_after_quota=1, over_bound=1),
    ]
    row = step_metrics(LoopState(step=1), 2, rounds, [], [])
    assert row["mean_running"] == (3.0 * 10.0 + 1.0 * 2.0) / 4.0
    assert row["timeline"] == [[0.0, 12], [2.0, 8], [3.5, 2]]
    assert (row["tokens_after_end"], row["reprefilled_tokens"], row["over_bound"]) == (5, 1, 1)
    assert row["carried"]["tokens"] == 7


def test_deciles_are_of_length_and_add_up_the_pull() -> None:
    """Rewards fall as lengths grow, so that an order by any other column would show."""
    samples = [sample(i, [2 - i % 2] * (22 - i), "f" * (22 - i), float(i)) for i in range(20)]
    halves = [range(10), range(10, 20)]
    packed: list[Any] = [SimpleNamespace(members=list(members)) for members in halves]
    one = torch.ones(10, dtype=torch.int64)
    sequences = [
        SequenceStats(torch.tensor([samples[i].drawn for i in members]), one, 0 * one, one.float())
        for members in halves
    ]
    trained = TrainedStep(samples, packed, StepReport(0.0, 1.0, True, 1e-6, LossStats(), sequences, 1.0))
    deciles = step_metrics(LoopState(step=1), 2, [rollout(1.0, 1.0, [])], samples, [trained])["deciles"]
    assert [d["length"] for d in deciles] == [2.5 + 2 * i for i in range(10)]
    assert [d["reward"] for d in deciles] == [18.5 - 2 * i for i in range(10)]
    assert {d["staleness"] for d in deciles} == {0.5}
    assert {d["pull"] for d in deciles} == {2.0}
    assert deciles[0]["clip_share"] == pytest.approx((1 / 2 + 1 / 3) / 2)
