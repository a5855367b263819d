"""The row of one step: what was delivered, how stale it was, what the loss made of it, where the time went."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer_bridge.batch import KEPT
from trainer_bridge.checkpoints import LoopState
from trainer_bridge.rollout import ScoredRollout
from trainer_bridge.samples import PackedMicroBatch, TrainingSample
from trainer_bridge.trainer import StepReport

DECILES = 10


def step_row(
    state: LoopState,
    version: int,
    rounds: Sequence[ScoredRollout],
    made: Sequence[TrainingSample],
    reports: Sequence[StepReport],
    cuts: Sequence[tuple[list[TrainingSample], PackedMicroBatch]],
) -> dict[str, Any]:
    """All figures of a step but its time split; `version` is the trainer's at the step. JSON values only."""
    lengths = np.array([len(response.output_ids) for response in made])
    rewards = np.array([response.reward for response in made if response.reward is not None])
    tokens = int(lengths.sum())
    generate_s = sum(rollout.generate_s for rollout in rounds)
    row: dict[str, Any] = {
        "step": state.step,
        "round_ids": [rollout.summary.round_id for rollout in rounds],
        "end_reason": rounds[-1].summary.end_reason,
        "version": version,
        "samples_so_far": state.samples,
        "seconds_so_far": state.seconds,
        "groups": sum(len(rollout.groups) for rollout in rounds),
        "samples": len(made),
        "masked": sum(response.masked for response in made),
        "truncated": sum(response.finish == "length" for response in made),
        **{name: sum(getattr(r, name) for r in rounds) for name in ("rejected", "unscored", "replaced")},
        "problems": [problem for rollout in rounds for problem in rollout.problems][:3],
        "reward": float(rewards.mean()) if rewards.size else None,
        "reward_std": float(rewards.std()) if rewards.size else None,
        "delivered_tokens": tokens,
        "generate_s": generate_s,
        "delivered_tokens_per_s": tokens / generate_s if generate_s else 0.0,
        "lengths": lengths.tolist(),
        "delivered": [[response.prompt_id, response.index] for response in made],
        **_staleness(made, version),
        **_engine(rounds),
        "deciles": _deciles(cuts, reports, version),
    }
    if reports:
        row |= {"loss": float(np.mean([r.loss for r in reports])), "lr": reports[-1].lr}
        row |= {"grad_norm": float(np.mean([r.grad_norm for r in reports])), "applied": all(r.applied for r in reports)}
        row["updates"] = [report.stats.row() for report in reports]
        row["warnings"] = sorted({warning for report in reports for warning in report.stats.warnings()})
    return row


def _staleness(made: Sequence[TrainingSample], version: int) -> dict[str, Any]:
    """Tokens by age, the shares of S7, and how many versions a sample was drawn over.

    `kv_drift`: mean |log π − log μ| of tokens that this policy drew on kept KV, π by a plain forward of the trainer;
    None where there are none, or the loss needs no such forward (`proximal: behaviour`).
    """
    by_age: Counter[int] = Counter()
    hybrid = tokens = over_three = 0
    drift: list[np.ndarray] = []
    for response in made:
        age = response.age(version)
        by_age.update(age.tolist())
        mixed = (age == 0) & (response.kv == KEPT)
        hybrid += int(mixed.sum())
        if len(response.proximal):
            drift.append(np.abs(response.proximal[mixed] - response.behaviour[mixed]))
        tokens += len(age)
        over_three += len(np.unique(age)) >= 3
    old = tokens - by_age[0]
    return {
        "tokens_by_age": {str(age): count for age, count in sorted(by_age.items())},
        "off_policy_share": old / tokens if tokens else 0.0,
        "hybrid_share": hybrid / tokens if tokens else 0.0,
        "kv_drift": float(np.concatenate(drift).mean()) if hybrid and drift else None,
        "over_three_versions": over_three / len(made) if made else 0.0,
        "staleness": max(by_age, default=0),
    }


def _engine(rounds: Sequence[ScoredRollout]) -> dict[str, Any]:
    """What the engine says of the rounds (S8, `stats`)."""
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


def _deciles(
    cuts: Sequence[tuple[list[TrainingSample], PackedMicroBatch]], reports: Sequence[StepReport], version: int
) -> list[dict[str, float]]:
    """Per decile of length: does anything silently take the gradient from long answers?"""
    told = [figures for report in reports for figures in report.sequences]
    rows = []
    for (part, cut), figures in zip(cuts, told, strict=True):
        for at, member in enumerate(cut.members):
            response = part[member]
            used = max(int(figures.tokens[at]), 1)
            rows.append(
                (
                    len(response.output_ids),
                    float(response.age(version).mean()),
                    int(figures.clipped[at]) / used,
                    int(figures.masked[at]) / used,
                    float(figures.pull[at]),
                    response.reward if response.reward is not None else math.nan,
                )
            )
    rows.sort(key=lambda row: row[0])
    names = ("length", "staleness", "clip_share", "mask_share", "pull", "reward")
    made = []
    for part_of in np.array_split(np.array(rows, dtype=float).reshape(-1, len(names)), DECILES):
        if len(part_of):
            mean = dict(zip(names, part_of.mean(0).tolist(), strict=True))
            made.append({**mean, "pull": float(part_of[:, names.index("pull")].sum())})
    return made
