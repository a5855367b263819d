"""Delivered groups and their scores become training samples, and these become micro-batches.

Prompts are not in the loss. Every response token has the logprob under which it was drawn, and the policy version and
KV provenance that drew it. A group's baseline uses all its scored samples whatever their versions. A sample without a
reward is masked: it is counted (`TrainingSample.masked`), but not in the loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from sglang_april.client.types import RolloutGroup, RolloutSample
from trainer_bridge.batch import PROVENANCE, MicroBatch, Sequences, Tokens
from trainer_bridge.config import Config
from trainer_bridge.corrections import engine_proximal
from trainer_bridge.losses import group_advantages, overlong_penalty, token_weights
from trainer_bridge.rewards import Score
from trainer_bridge.trainer import Trainer


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A delivered group and the scores of its samples, in the same order."""

    group: RolloutGroup
    scores: list[Score]

    @property
    def scored(self) -> int:
        """Number of samples with a reward."""
        return sum(score.reward is not None for score in self.scores)

    def training_samples(self, config: Config) -> "list[TrainingSample]":
        """All samples with their advantages."""
        rewards = np.array([_shaped_reward(s, score, config) for s, score in _pairs(self)])
        return [
            _training_sample(self.group, sample, score, float(advantage))
            for (sample, score), advantage in zip(_pairs(self), reward_advantages(rewards, config), strict=True)
        ]


class TrainableGroup(Protocol):
    """A group of samples or of trajectories that a round has delivered."""

    def training_samples(self, config: Config) -> "list[TrainingSample]":
        """All sequences with their advantages."""


@dataclass(slots=True, eq=False)
class TrainingSample:
    """A sequence as the trainer uses it: a sample, or a branch of a trajectory. Arrays have one element per output
    token, T of them. In a trajectory these are all tokens from the first one in the loss to the last one."""

    prompt_id: str
    index: int
    """Index of the sample or trajectory in its group; equal for all branches of a trajectory."""
    prompt_ids: np.ndarray
    """int32 [prompt_len]."""
    output_ids: np.ndarray
    """int32 [T], including the stop or EOS token."""
    loss_mask: np.ndarray
    """bool [T]: the model drew the token, and no earlier branch has it. The loss leaves out all others."""
    behaviour: np.ndarray
    """float32 [T]: logprob under which each token was drawn; NaN where the model drew none."""
    version: np.ndarray
    """int64 [T]: the policy version that drew it."""
    kv: np.ndarray
    """int8 [T]: index into PROVENANCE."""
    recomputed: np.ndarray | None
    """float32 [T]: the engine's proximal logprobs, NaN where absent."""
    recomputed_version: int | None
    reward: float | None
    """The value of the reward function; None: masked."""
    advantage: float
    finish: str
    turns: int = 1
    """Legs of the trajectory that this sequence has and no earlier branch has."""
    proximal: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [T]: logprobs under the proximal policy; set before the step if the loss reads them (`fill_proximal`)."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def masked(self) -> bool:
        """Whether the sample is excluded from the loss."""
        return self.reward is None

    @property
    def drawn(self) -> int:
        """Number of tokens in the loss mask."""
        return int(np.count_nonzero(self.loss_mask))

    def age(self, version: int) -> np.ndarray:
        """int64 [T]: how many versions older than the trainer's each token is."""
        return version - self.version


def training_samples(groups: Iterable[TrainableGroup], config: Config) -> list[TrainingSample]:
    """All samples of all groups, in delivery order, with advantages."""
    return [sample for group in groups for sample in group.training_samples(config)]


def reward_advantages(rewards: np.ndarray, config: Config) -> np.ndarray:
    """float64 [n]: the advantages of a group of n samples; `rewards` are NaN where there is none."""
    if config.loss.algorithm in ("ppo", "reinforce"):
        return np.nan_to_num(rewards)
    return group_advantages(rewards, normalise=config.normalize_advantages)


def _pairs(scored: ScoredGroup) -> Iterable[tuple[RolloutSample, Score]]:
    return zip(scored.group.samples, scored.scores, strict=True)


def _shaped_reward(sample: RolloutSample, score: Score, config: Config) -> float:
    """The reward with DAPO's overlong penalty if configured; NaN if the sample has no reward."""
    if score.reward is None:
        return float("nan")
    if not config.overlong_buffer_len:
        return score.reward
    max_length = config.rollout_max_response_len
    return score.reward + overlong_penalty(len(sample.output_ids), max_length, config.overlong_buffer_len)


def _training_sample(group: RolloutGroup, sample: RolloutSample, score: Score, advantage: float) -> TrainingSample:
    count = len(sample.output_ids)
    version, kv = np.full(count, -1, np.int64), np.zeros(count, np.int8)
    for span in sample.spans:
        version[span.start : span.end] = span.version
        kv[span.start : span.end] = PROVENANCE.index(span.kv)
    if count and version.min() < 0:
        raise ValueError(f"sample {sample.index} of prompt {group.id!r}: its spans do not cover its tokens")
    return TrainingSample(
        prompt_id=group.id,
        index=sample.index,
        prompt_ids=group.prompt_ids,
        output_ids=sample.output_ids,
        loss_mask=np.ones(count, bool),
        behaviour=sample.logprobs,
        version=version,
        kv=kv,
        recomputed=sample.proximal_logprobs,
        recomputed_version=sample.proximal_version,
        reward=score.reward,
        advantage=advantage,
        finish=str(sample.finish_reason.get("type")),
    )


def sequences_by_response(samples: Sequence[TrainingSample]) -> list[list[int]]:
    """The indices of the sequences of each sample or trajectory, in the order of its first one."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, sample in enumerate(samples):
        members.setdefault((sample.prompt_id, sample.index), []).append(i)
    return list(members.values())


def fill_proximal(samples: Sequence[TrainingSample], version: int, config: Config, trainer: Trainer) -> None:
    """Set `proximal` of all samples: from the engine where it has the logprobs, else by a forward of the trainer."""
    from_engine = config.loss.proximal == "engine"
    unknown = []
    for sample in samples:
        if from_engine:
            sample.proximal = engine_proximal(
                sample.behaviour,
                sample.recomputed,
                sample.recomputed_version,
                sample.age(version),
                sample.kv,
                version,
            )
        if not from_engine or np.isnan(sample.proximal).any():
            unknown.append(sample)
    packed = pack_micro_batches(unknown, version, config)
    forward = trainer.logprobs([micro_batch.batch.sequences for micro_batch in packed])
    for micro_batch, logprobs in zip(packed, forward, strict=True):
        flat, start = logprobs.numpy(), 0
        for sample in (unknown[i] for i in micro_batch.members):
            computed = flat[start : start + len(sample.output_ids)]
            start += len(computed)
            if from_engine:
                computed = np.where(np.isnan(sample.proximal), computed, sample.proximal)
            sample.proximal = computed.astype(np.float32)


def split_updates(samples: Sequence[TrainingSample], batch_size: int | None) -> list[list[TrainingSample]]:
    """The samples of each optimiser step: `batch_size` at a time in delivery order, without masked ones.

    The branches of a trajectory count as one. A remainder smaller than half a batch is added to the last one. None: one
    step over all samples.
    """
    used = [sample for sample in samples if not sample.masked and len(sample.output_ids)]
    responses = sequences_by_response(used)
    if batch_size is None or len(responses) <= batch_size:
        return [used] if used else []
    starts = list(range(0, len(responses), batch_size))
    if len(responses) - starts[-1] < batch_size / 2:
        starts.pop()
    ends = [*starts[1:], len(responses)]
    return [
        [used[i] for response in responses[start:end] for i in response]
        for start, end in zip(starts, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMicroBatch:
    """A micro-batch and the indices of its samples in the update, in its order."""

    batch: MicroBatch
    members: list[int]


def pack_micro_batches(samples: Sequence[TrainingSample], version: int, config: Config) -> list[PackedMicroBatch]:
    """The micro-batches of one optimiser step, longest samples first, which balances the data-parallel ranks.

    There is no padding (`megatron/model.py`), so the lengths in a micro-batch sum to at most `max_tokens_per_gpu`. A
    longer sample gets a separate micro-batch. Every sample is in exactly one micro-batch.
    """
    weights = _token_weights(samples, config)
    longest_first = sorted(range(len(samples)), key=lambda i: -len(samples[i]))
    packs: list[list[int]] = []
    total = 0
    for i in longest_first:
        total += len(samples[i])
        if packs and total <= config.max_tokens_per_gpu:
            packs[-1].append(i)
        else:
            packs.append([i])
            total = len(samples[i])
    return [
        PackedMicroBatch(
            _micro_batch(
                [samples[i] for i in members], [weights[i] for i in members], version, config.rollout_temperature
            ),
            members,
        )
        for members in packs
    ]


def _token_weights(samples: Sequence[TrainingSample], config: Config) -> list[np.ndarray]:
    """The weights of each sample's tokens, float32 [T]. The branches of a trajectory count as one response."""
    responses = sequences_by_response(samples)
    masks = [np.concatenate([samples[i].loss_mask for i in response]) for response in responses]
    weights = [np.zeros(0, np.float32)] * len(samples)
    for response, joined in zip(responses, token_weights(masks, config.loss.mean_over), strict=True):
        ends = np.cumsum([len(samples[i].loss_mask) for i in response])[:-1]
        for i, part in zip(response, np.split(joined, ends), strict=True):
            weights[i] = part
    return weights


def _micro_batch(
    samples: Sequence[TrainingSample], weights: Sequence[np.ndarray], version: int, temperature: float
) -> MicroBatch:
    ids = np.concatenate([part for s in samples for part in (s.prompt_ids, s.output_ids)]).astype(np.int64)
    counts = np.array([len(s.output_ids) for s in samples])
    proximal = [s.proximal if len(s.proximal) else np.full(len(s.output_ids), np.nan, np.float32) for s in samples]
    return MicroBatch(
        Sequences(
            ids=torch.from_numpy(ids),
            lengths=torch.tensor([len(s) for s in samples]),
            responses=torch.from_numpy(counts),
            temperature=torch.full((len(samples),), temperature),
        ),
        Tokens(
            behaviour=_flat(s.behaviour for s in samples),
            proximal=_flat(proximal),
            advantages=_flat(np.full(len(s.output_ids), s.advantage, np.float32) for s in samples),
            weights=_flat(weights),
            sequence=torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
            age=torch.from_numpy(np.concatenate([s.age(version) for s in samples])),
            kv=torch.from_numpy(np.concatenate([s.kv for s in samples])),
            count=len(samples),
        ),
    )


def _flat(parts: Iterable[np.ndarray]) -> torch.Tensor:
    """float32 [T]: a copy of all parts; the arrays of a reply are read-only."""
    return torch.from_numpy(np.concatenate([part.astype(np.float32) for part in parts]))
