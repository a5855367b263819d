"""The row of a step."""

import math

import pytest

from sglang_april.client.types import RolloutSummary
from tests.bridge.test_rollout import STATS
from trainer_bridge.checkpoints import LoopState
from trainer_bridge.loss_stats import LossStats
from trainer_bridge.metrics import TrainedStep, step_metrics
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.trainer import StepReport


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
