"""Delivered trajectories become training samples: one sequence per branch of the record.

A token that the model drew is trained on in the first branch in which it is drawn, so that none counts twice. Tokens
from outside, such as what a tool returned, are inputs of the model and not in the loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_april.api.ids import common_prefix
from sglang_april.client.types import RecordedTrajectory, TrajectoryBranch
from trainer_bridge.batch import PROVENANCE
from trainer_bridge.config import Config
from trainer_bridge.samples import TrainingSample, reward_advantages


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryGroup:
    """Trajectories of one prompt that a round has delivered together."""

    prompt_id: str
    trajectories: list[RecordedTrajectory]
    """Each has the index in its group in `metadata` (`agent_trajectories.py`)."""

    def training_samples(self, config: Config) -> list[TrainingSample]:
        """The sequences of all trajectories, with advantages. Those of trajectories without a reward are masked."""
        rewards = np.array([np.nan if t.reward is None else t.reward for t in self.trajectories], dtype=float)
        advantages = reward_advantages(rewards, config)
        return [
            sample
            for trajectory, advantage in zip(self.trajectories, advantages, strict=True)
            for sample in _sequences(self.prompt_id, trajectory, float(advantage))
        ]


def _sequences(prompt_id: str, trajectory: RecordedTrajectory, advantage: float) -> Iterator[TrainingSample]:
    """One sample per branch in which the model drew a token that it drew in no earlier branch."""
    seen: set[int] = set()
    earlier: list[tuple[np.ndarray, np.ndarray]] = []
    """Ids of each earlier branch, and which of them were drawn."""
    finish = {leg.leg: leg.finish_reason for leg in trajectory.legs}  # a refused request has used up a number
    for branch in trajectory.branches:
        drawn = _drawn(branch)
        earlier.append((branch.ids, drawn.copy()))
        for ids, drawn_before in earlier[:-1] if branch.shared else ():
            common = common_prefix(ids, branch.ids)
            drawn[:common] &= ~drawn_before[:common]
        new_legs = set(branch.legs) - seen
        seen |= new_legs
        if not drawn.any():
            continue
        start, end = int(drawn.argmax()), len(drawn) - int(drawn[::-1].argmax())
        version, kv = _provenance(trajectory.id, branch)
        if (version[start:end][drawn[start:end]] < 0).any():
            raise ValueError(f"trajectory {trajectory.id!r}: its spans do not cover its tokens")
        yield TrainingSample(
            prompt_id=prompt_id,
            index=int(trajectory.metadata["index"]),
            prompt_ids=branch.ids[:start],
            output_ids=branch.ids[start:end],
            loss_mask=drawn[start:end],
            behaviour=branch.logprobs[start:end],
            version=version[start:end],
            kv=kv[start:end],
            recomputed=None,
            recomputed_version=None,
            reward=trajectory.reward,
            advantage=advantage,
            finish=str(finish[branch.legs[-1]].get("type")),
            turns=len(new_legs),
        )


def _drawn(branch: TrajectoryBranch) -> np.ndarray:
    """bool [N]: drawn by the model."""
    mask = np.zeros(len(branch.ids), bool)
    for start, end in branch.drawn:
        mask[start:end] = True
    return mask


def _provenance(trajectory_id: str, branch: TrajectoryBranch) -> tuple[np.ndarray, np.ndarray]:
    """Version (int64 [N]) and provenance (int8 [N]) of each token. Those that the model did not draw have the values of
    the drawn token before them; the loss reads neither."""
    count = len(branch.ids)
    version, kv = np.full(count, -1, np.int64), np.zeros(count, np.int8)
    for span in branch.spans:
        if not 0 <= span.start < span.end <= count:
            raise ValueError(f"trajectory {trajectory_id!r}: span {span} is outside of its {count} tokens")
        version[span.start : span.end] = span.version
        kv[span.start : span.end] = PROVENANCE.index(span.kv)
    outside = np.ones(count, bool)
    for start, end in branch.drawn:
        outside[start:end] = False
    before = np.maximum.accumulate(np.where(outside, -1, np.arange(count)))
    filled = outside & (before >= 0)
    version[filled], kv[filled] = version[before[filled]], kv[before[filled]]
    return version, kv
