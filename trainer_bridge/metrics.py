"""The metrics of one step: delivered samples, staleness, loss statistics, and the engine's statistics."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer_bridge.batch import KEPT
from trainer_bridge.checkpoints import LoopState
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.samples import PackedMicroBatch, TrainingSample, sequences_by_response
from trainer_bridge.trainer import StepReport

DECILES = 10


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """One optimiser step: its samples, how they were packed, and the trainer's report."""

    samples: list[TrainingSample]
    packed: list[PackedMicroBatch]
    report: StepReport


def step_metrics(
    state: LoopState,
    version: int,
    rounds: Sequence[ScoredRollout],
    samples: Sequence[TrainingSample],
    trained: Sequence[TrainedStep],
    *,
    rate_known: bool = True,
) -> dict[str, Any]:
    """All metrics of a step except its durations, as JSON values.

    Args:
        version: the trainer's policy version.
        rate_known: False if engines may have drawn tokens of the rounds before these were opened (again), in a time
            that their statistics do not contain.
    """
    responses = [[samples[i] for i in response] for response in sequences_by_response(samples)]
    firsts = [response[0] for response in responses]
    lengths = np.array([sum(part.drawn for part in response) for response in responses], dtype=np.int64)
    turns = [sum(part.turns for part in response) for response in responses]
    rewards = np.array([sample.reward for sample in firsts if sample.reward is not None])
    reports = [step.report for step in trained]
    tokens = int(lengths.sum())
    generate_s = sum(rollout.generate_s for rollout in rounds)
    engine_s = sum(rollout.summary.stats["duration_s"] for rollout in rounds)
    row: dict[str, Any] = {
        "step": state.step,
        "round_ids": [rollout.summary.round_id for rollout in rounds],
        "end_reason": rounds[-1].summary.end_reason,
        "version": version,
        "samples_so_far": state.samples,
        "seconds_so_far": state.seconds,
        "groups": sum(len(rollout.groups) for rollout in rounds),
        "samples": len(responses),
        "masked": sum(sample.masked for sample in firsts),
        "truncated": sum(sample.finish == "length" for sample in firsts),
        **{name: sum(getattr(r, name) for r in rounds) for name in ("rejected", "unscored", "replaced")},
        "problems": [problem for rollout in rounds for problem in rollout.problems][:3],
        "reward": float(rewards.mean()) if rewards.size else None,
        "reward_std": float(rewards.std()) if rewards.size else None,
        "delivered_tokens": tokens,
        "generate_s": generate_s,
        "delivered_tokens_per_s": tokens / engine_s if engine_s and rate_known else None,
        "lengths": lengths.tolist(),
        "turns": turns,
        "delivered": [[sample.prompt_id, sample.index] for sample in firsts],
        **_staleness_metrics(samples, version),
        **_engine_metrics(rounds),
        "deciles": _length_deciles(trained, version),
    }
    if reports:
        row |= {"loss": float(np.mean([r.loss for r in reports])), "lr": reports[-1].lr}
        row |= {"grad_norm": float(np.mean([r.grad_norm for r in reports])), "applied": all(r.applied for r in reports)}
        row["updates"] = [report.stats.row() for report in reports]
        row["warnings"] = _warnings(reports)
    return row


def _warnings(reports: Sequence[StepReport]) -> list[str]:
    warnings = sorted({warning for report in reports for warning in report.stats.warnings()})
    skipped = sum(not report.applied for report in reports)
    if skipped:
        warnings.append(f"{skipped} of {len(reports)} optimiser steps skipped: the gradient is not finite")
    return warnings


def _staleness_metrics(samples: Sequence[TrainingSample], version: int) -> dict[str, Any]:
    """Tokens by age, off-policy and hybrid share, and the share of samples drawn over several versions.

    `kv_drift`: mean |log π − log μ| of tokens that this policy drew on kept KV, where π is a forward of the trainer;
    None if there are none, or the loss needs no such forward (`proximal: behaviour`).
    """
    by_age: Counter[int] = Counter()
    hybrid = tokens = over_three = 0
    drift: list[np.ndarray] = []
    for sample in samples:
        age = sample.age(version)[sample.loss_mask]
        by_age.update(age.tolist())
        is_hybrid = sample.loss_mask & (sample.version == version) & (sample.kv == KEPT)
        hybrid += int(is_hybrid.sum())
        if len(sample.proximal):
            drift.append(np.abs(sample.proximal[is_hybrid] - sample.behaviour[is_hybrid]))
        tokens += len(age)
        over_three += len(np.unique(age)) >= 3
    old = tokens - by_age[0]
    return {
        "tokens_by_age": {str(age): count for age, count in sorted(by_age.items())},
        "off_policy_share": old / tokens if tokens else 0.0,
        "hybrid_share": hybrid / tokens if tokens else 0.0,
        "kv_drift": float(np.concatenate(drift).mean()) if hybrid and drift else None,
        "over_three_versions": over_three / len(samples) if samples else 0.0,
        "staleness": max(by_age, default=0),
    }


def _engine_metrics(rounds: Sequence[ScoredRollout]) -> dict[str, Any]:
    """The `stats` of the rounds, as the engine reports them, added up."""
    stats = [rollout.summary.stats for rollout in rounds]
    duration = sum(s["duration_s"] for s in stats)
    timeline, start = [], 0.0
    for s in stats:
        timeline += [[start + at, running] for at, running in s["timeline"]]
        start += s["duration_s"]
    return {
        "tokens_after_end": sum(s["tokens_after_quota"] for s in stats),
        "reprefilled_tokens": sum(s["reprefilled_tokens"] for s in stats),
        "over_bound": sum(s["over_bound"] for s in stats),
        "mean_running": sum(s["mean_running"] * s["duration_s"] for s in stats) / duration if duration else 0.0,
        "timeline": timeline,
        "carried": {name: rounds[-1].summary.carried.get(name) for name in ("groups", "samples", "tokens")},
    }


def _length_deciles(trained: Sequence[TrainedStep], version: int) -> list[dict[str, float]]:
    """Statistics per decile of response length, which show whether long responses lose their gradient."""
    rows = []
    for step in trained:
        for micro_batch, stats in zip(step.packed, step.report.sequences, strict=True):
            for position, member in enumerate(micro_batch.members):
                sample = step.samples[member]
                used = max(int(stats.tokens[position]), 1)
                rows.append(
                    (
                        sample.drawn,
                        float(sample.age(version)[sample.loss_mask].mean()),
                        int(stats.clipped[position]) / used,
                        int(stats.masked[position]) / used,
                        float(stats.pull[position]),
                        sample.reward if sample.reward is not None else math.nan,
                    )
                )
    rows.sort(key=lambda row: row[0])
    names = ("length", "staleness", "clip_share", "mask_share", "pull", "reward")
    deciles = []
    for decile in np.array_split(np.array(rows, dtype=float).reshape(-1, len(names)), DECILES):
        if len(decile):
            mean = dict(zip(names, decile.mean(0).tolist(), strict=True))
            deciles.append({**mean, "pull": float(decile[:, names.index("pull")].sum())})
    return deciles
