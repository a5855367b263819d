"""Delivered groups become micro-batches: no token is lost or misplaced, whatever the lengths."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_april.client.types import RolloutGroup, RolloutSample, Span
from trainer_bridge.batch import PROVENANCE
from trainer_bridge.config import Config
from trainer_bridge.rewards import Score
from trainer_bridge.samples import ScoredGroup, TrainingSample, pack_micro_batches, split_updates, training_samples


def config(**fields: Any) -> Config:
    return Config.from_fields({"hf_checkpoint": "m", "prompt_data": "d", **fields})


def sample(index: int, length: int, spans: list[Span] | None = None) -> RolloutSample:
    ids = np.arange(length, dtype=np.int32) + 100 * index
    return RolloutSample(
        index=index,
        output_ids=ids,
        text="",
        finish_reason={"type": "stop"},
        seed=0,
        logprobs=-ids.astype(np.float32) / 1000,
        logprob_kind="processed",
        spans=spans or [Span(0, length, 3, "fresh")],
    )


def group(name: str, lengths: list[int], rewards: list[float | None], prompt: int = 3, **fields: Any) -> ScoredGroup:
    rollout_group = RolloutGroup(
        id=name,
        incarnation=0,
        metadata=None,
        prompt_ids=np.arange(prompt, dtype=np.int32),
        complete=True,
        accepted=None,
        samples=[sample(i, length, **fields) for i, length in enumerate(lengths)],
    )
    return ScoredGroup(rollout_group, [Score(reward, "" if reward is not None else "failed") for reward in rewards])


def test_advantages_are_relative_to_scored_samples_and_the_others_are_masked() -> None:
    samples = training_samples([group("a", [4, 4, 4], [1.0, None, 3.0])], config())
    assert [r.masked for r in samples] == [False, True, False]
    assert [round(r.advantage, 3) for r in samples] == [-0.707, 0.0, 0.707]
    assert [len(part) for part in split_updates(samples, None)] == [2]


def test_baseline_includes_samples_of_all_versions() -> None:
    mixed = group("a", [4, 4], [0.0, 1.0], spans=[Span(0, 1, 1, "fresh"), Span(1, 4, 3, "kept")])
    samples = training_samples([mixed], config(normalize_advantages=False))
    assert [r.advantage for r in samples] == [-0.5, 0.5]
    assert samples[0].age(3).tolist() == [2, 0, 0, 0]
    assert [PROVENANCE[k] for k in samples[0].kv] == ["fresh", "kept", "kept", "kept"]


def test_spans_must_cover_all_tokens() -> None:
    with pytest.raises(ValueError, match="spans"):
        training_samples([group("a", [4], [1.0], spans=[Span(0, 3, 1, "fresh")])], config())


def test_ppo_takes_rewards_as_advantages() -> None:
    samples = training_samples([group("a", [4, 4], [0.25, -2.0])], config(advantage_estimator="ppo"))
    assert [r.advantage for r in samples] == [0.25, -2.0]


def test_overlong_penalty_changes_the_advantage_but_not_the_reported_reward() -> None:
    samples = training_samples(
        [group("a", [100, 40], [1.0, 1.0])],
        config(overlong_buffer_len=50, rollout_max_response_len=100, normalize_advantages=False),
    )
    assert [r.advantage for r in samples] == [-0.5, 0.5]
    assert [r.reward for r in samples] == [1.0, 1.0]


@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=4), min_size=1, max_size=12),
    budget=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_in_exactly_one_micro_batch(lengths: list[list[int]], budget: int) -> None:
    groups = [
        group(f"g{i}", each, [float(k) for k in range(len(each))], prompt=i + 1) for i, each in enumerate(lengths)
    ]
    samples = training_samples(groups, config())
    packed = pack_micro_batches(samples, 3, config(max_tokens_per_gpu=budget))
    assert sorted(i for micro_batch in packed for i in micro_batch.members) == list(range(len(samples)))
    total = 0.0
    for micro_batch in packed:
        sequences, tokens = micro_batch.batch.sequences, micro_batch.batch.tokens
        members = [samples[i] for i in micro_batch.members]
        assert len(members) == 1 or sum(map(len, members)) <= budget
        assert sequences.lengths.tolist() == [len(r) for r in members]
        start = 0
        for row, member in enumerate(members):
            end = start + len(member)
            expected = [*member.prompt_ids.tolist(), *member.output_ids.tolist()]
            assert sequences.ids[start:end].tolist() == expected
            selected = tokens.sequence == row
            assert np.array_equal(tokens.behaviour[selected].numpy(), member.behaviour)
            assert tokens.advantages[selected].unique().numel() <= 1
            start = end
        assert len(tokens.behaviour) == int(sequences.responses.sum())
        total += float(tokens.weights.sum())
    assert total == pytest.approx(1.0, abs=1e-4)


def test_micro_batch_is_filled_up_to_the_token_limit_without_padding() -> None:
    samples = training_samples([group("a", [97, 47], [0.0, 1.0]), group("b", [27, 17], [0.0, 1.0])], config())
    packed = pack_micro_batches(samples, 3, config(max_tokens_per_gpu=200))
    assert [micro_batch.batch.sequences.lengths.tolist() for micro_batch in packed] == [[100, 50, 30, 20]]


@pytest.mark.parametrize(
    ("count", "size", "sizes"),
    [(16, None, [16]), (16, 8, [8, 8]), (18, 8, [8, 10]), (20, 8, [8, 8, 4]), (5, 8, [5]), (0, 8, [])],
)
def test_optimiser_steps_use_all_samples(count: int, size: int | None, sizes: list[int]) -> None:
    samples: list[TrainingSample] = training_samples([group(f"g{i}", [3], [1.0]) for i in range(count)], config())
    updates = split_updates(samples, size)
    assert [len(update) for update in updates] == sizes
    assert [r for update in updates for r in update] == samples


def test_optimiser_steps_count_trajectories_and_split_none() -> None:
    """Three trajectories of three branches each, two per step."""
    branches = [group("g", [3, 3, 3], [1.0, 0.0, 0.5]) for _ in range(3)]
    samples = sorted(training_samples(branches, config()), key=lambda branch: branch.index)
    updates = split_updates(samples, 2)
    assert [[branch.index for branch in update] for update in updates] == [[0, 0, 0, 1, 1, 1], [2, 2, 2]]
