"""Step 7 (train), second part: groups of a reply with their scores become micro-batches.

The prompt is not in the loss; every response token carries the logprob under which it was drawn, the version and the KV
that drew it. A group's baseline uses all its scored members whatever their versions. A sample without a reward is
masked: it stays in the count (`TrainingSample.masked`) and out of the loss.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sglang_april.client.types import RolloutGroup, RolloutSample
from trainer_bridge.batch import PROVENANCE, MicroBatch, Sequences, Tokens
from trainer_bridge.config import Config
from trainer_bridge.corrections import engine_proximal
from trainer_bridge.losses import group_advantages, overlong_penalty, token_weights
from trainer_bridge.rewards import Score


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A delivered group and what its samples were given, in their order."""

    group: RolloutGroup
    scores: list[Score]

    @property
    def scored(self) -> int:
        """Samples that have a reward."""
        return sum(score.reward is not None for score in self.scores)


@dataclass(slots=True, eq=False)
class TrainingSample:
    """One sample as the trainer sees it; arrays have one element per output token, T of them."""

    prompt_id: str
    index: int
    prompt_ids: np.ndarray
    """int32 [prompt_len]."""
    output_ids: np.ndarray
    """int32 [T], the stop or EOS token included."""
    behaviour: np.ndarray
    """float32 [T]: logprob under which each token was drawn."""
    version: np.ndarray
    """int64 [T]: the policy version that drew it."""
    kv: np.ndarray
    """int8 [T]: index into PROVENANCE."""
    recomputed: np.ndarray | None
    """float32 [T]: the engine's proximal logprobs, NaN where absent."""
    recomputed_version: int | None
    reward: float | None
    """As the reward function gave it; None: masked."""
    advantage: float
    finish: str
    proximal: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [T]: filled before a step where the loss reads it."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def masked(self) -> bool:
        """Whether no token of it is in the loss."""
        return self.reward is None

    def age(self, version: int) -> np.ndarray:
        """int64 [T]: how many versions older than the trainer's each token is."""
        return version - self.version


def responses(groups: Sequence[ScoredGroup], config: Config) -> list[TrainingSample]:
    """All samples of all groups, in the order of delivery, with advantages."""
    made = []
    for scored in groups:
        rewards = np.array([_shaped(s, score, config) for s, score in _pairs(scored)])
        if config.advantage_estimator in ("ppo", "reinforce"):
            advantages = np.nan_to_num(rewards)
        else:
            advantages = group_advantages(rewards, normalise=config.normalize_advantages)
        for (sample, score), advantage in zip(_pairs(scored), advantages, strict=True):
            made.append(_response(scored.group, sample, score, float(advantage)))
    return made


def _pairs(scored: ScoredGroup) -> Iterable[tuple[RolloutSample, Score]]:
    return zip(scored.group.samples, scored.scores, strict=True)


def _shaped(sample: RolloutSample, score: Score, config: Config) -> float:
    """The reward, with DAPO's punishment of overlong answers where asked for; NaN where there is none."""
    if score.reward is None:
        return float("nan")
    if not config.overlong_buffer_len:
        return score.reward
    longest = config.rollout_max_response_len
    return score.reward + overlong_penalty(len(sample.output_ids), longest, config.overlong_buffer_len)


def _response(group: RolloutGroup, sample: RolloutSample, score: Score, advantage: float) -> TrainingSample:
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
        behaviour=sample.logprobs,
        version=version,
        kv=kv,
        recomputed=sample.proximal_logprobs,
        recomputed_version=sample.proximal_version,
        reward=score.reward,
        advantage=advantage,
        finish=str(sample.finish_reason.get("type")),
    )


def known_proximal(response: TrainingSample, version: int) -> np.ndarray:
    """π_old as far as the engine knows it, float32 [T]; NaN where the trainer's forward must tell."""
    return engine_proximal(
        response.behaviour,
        response.recomputed,
        response.recomputed_version,
        response.age(version),
        response.kv,
        version,
    )


def updates(made: Sequence[TrainingSample], samples: int | None) -> list[list[TrainingSample]]:
    """The responses of each optimiser step: `samples` at a time in the order of delivery, masked ones left out.

    A rest smaller than half a batch joins the last one.
    """
    used = [response for response in made if not response.masked and len(response.output_ids)]
    if samples is None or len(used) <= samples:
        return [used] if used else []
    starts = list(range(0, len(used), samples))
    if len(used) - starts[-1] < samples / 2:
        starts.pop()
    ends = [*starts[1:], len(used)]
    return [used[start:end] for start, end in zip(starts, ends, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMicroBatch:
    """A micro-batch, and which of the step's responses stand in it, in its order."""

    batch: MicroBatch
    members: list[int]


def micro_batches(made: Sequence[TrainingSample], version: int, config: Config) -> list[PackedMicroBatch]:
    """The micro-batches of one optimiser step, the longest first, so that sharing them out evenly is easy.

    Nothing is padded (`megatron/model.py`), so their lengths sum to at most `max_tokens_per_gpu`; a response that is
    longer stands by itself. Every response is in exactly one micro-batch.
    """
    weights = token_weights([np.ones(len(r.output_ids), bool) for r in made], config.loss.mean_over)
    order = sorted(range(len(made)), key=lambda i: -len(made[i]))
    rows: list[list[int]] = []
    total = 0
    for i in order:
        total += len(made[i])
        if rows and total <= config.max_tokens_per_gpu:
            rows[-1].append(i)
        else:
            rows.append([i])
            total = len(made[i])
    return [
        PackedMicroBatch(
            _micro_batch(
                [made[i] for i in members], [weights[i] for i in members], version, config.rollout_temperature
            ),
            members,
        )
        for members in rows
    ]


def _micro_batch(
    made: Sequence[TrainingSample], weights: Sequence[np.ndarray], version: int, temperature: float
) -> MicroBatch:
    ids = np.concatenate([part for r in made for part in (r.prompt_ids, r.output_ids)]).astype(np.int64)
    counts = np.array([len(r.output_ids) for r in made])
    proximal = [r.proximal if len(r.proximal) else np.full(len(r.output_ids), np.nan, np.float32) for r in made]
    return MicroBatch(
        Sequences(
            ids=torch.from_numpy(ids),
            lengths=torch.tensor([len(r) for r in made]),
            responses=torch.from_numpy(counts),
            temperature=torch.full((len(made),), temperature),
        ),
        Tokens(
            behaviour=_flat(r.behaviour for r in made),
            proximal=_flat(proximal),
            advantages=_flat(np.full(len(r.output_ids), r.advantage, np.float32) for r in made),
            weights=_flat(weights),
            sequence=torch.from_numpy(np.repeat(np.arange(len(made)), counts)),
            age=torch.from_numpy(np.concatenate([r.age(version) for r in made])),
            kv=torch.from_numpy(np.concatenate([r.kv for r in made])),
            count=len(made),
        ),
    )


def _flat(parts: Iterable[np.ndarray]) -> torch.Tensor:
    """float32 [T] of all, in a memory of its own: a reply's arrays are read-only."""
    return torch.from_numpy(np.concatenate([part.astype(np.float32) for part in parts]))
