"""Replies to micro-batches: nothing dropped, nothing mixed up, whatever the lengths."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_april.client.types import RolloutGroup, RolloutSample, Span
from trainer_bridge.batch import PROVENANCE
from trainer_bridge.config import Config
from trainer_bridge.rewards import Score
from trainer_bridge.samples import ScoredGroup, TrainingSample, micro_batches, responses, updates


def config(**fields: Any) -> Config:
    return Config(hf_checkpoint="m", prompt_data="d", **fields)


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
    made = RolloutGroup(
        id=name,
        incarnation=0,
        metadata=None,
        prompt_ids=np.arange(prompt, dtype=np.int32),
        complete=True,
        accepted=None,
        samples=[sample(i, length, **fields) for i, length in enumerate(lengths)],
    )
    return ScoredGroup(made, [Score(reward, "" if reward is not None else "failed") for reward in rewards])


def test_advantages_are_of_the_scored_members_and_the_others_are_masked() -> None:
    made = responses([group("a", [4, 4, 4], [1.0, None, 3.0])], config())
    assert [r.masked for r in made] == [False, True, False]
    assert [round(r.advantage, 3) for r in made] == [-0.707, 0.0, 0.707]
    assert [len(part) for part in updates(made, None)] == [2]


def test_baseline_takes_all_members_whatever_their_versions() -> None:
    mixed = group("a", [4, 4], [0.0, 1.0], spans=[Span(0, 1, 1, "fresh"), Span(1, 4, 3, "kept")])
    made = responses([mixed], config(normalize_advantages=False))
    assert [r.advantage for r in made] == [-0.5, 0.5]
    assert made[0].age(3).tolist() == [2, 0, 0, 0]
    assert [PROVENANCE[k] for k in made[0].kv] == ["fresh", "kept", "kept", "kept"]


def test_spans_that_leave_a_token_out_are_an_error() -> None:
    with pytest.raises(ValueError, match="spans"):
        responses([group("a", [4], [1.0], spans=[Span(0, 3, 1, "fresh")])], config())


def test_given_advantages() -> None:
    made = responses([group("a", [4, 4], [0.25, -2.0])], config(advantage_estimator="ppo"))
    assert [r.advantage for r in made] == [0.25, -2.0]


def test_overlong_answers_are_punished_but_their_reward_is_told() -> None:
    made = responses(
        [group("a", [100, 40], [1.0, 1.0])],
        config(overlong_buffer_len=50, rollout_max_response_len=100, normalize_advantages=False),
    )
    assert [r.advantage for r in made] == [-0.5, 0.5]
    assert [r.reward for r in made] == [1.0, 1.0]


@given(
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=2, max_size=4), min_size=1, max_size=12),
    budget=st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_every_token_is_in_exactly_one_micro_batch(lengths: list[list[int]], budget: int) -> None:
    groups = [
        group(f"g{i}", each, [float(k) for k in range(len(each))], prompt=i + 1) for i, each in enumerate(lengths)
    ]
    made = responses(groups, config())
    cuts = micro_batches(made, 3, config(max_tokens_per_gpu=budget))
    assert sorted(i for cut in cuts for i in cut.members) == list(range(len(made)))
    total = 0.0
    for cut in cuts:
        sequences, tokens = cut.batch.sequences, cut.batch.tokens
        members = [made[i] for i in cut.members]
        assert len(members) == 1 or sum(map(len, members)) <= budget
        assert sequences.lengths.tolist() == [len(r) for r in members]
        at = 0
        for row, response in enumerate(members):
            end = at + len(response)
            expected = [*response.prompt_ids.tolist(), *response.output_ids.tolist()]
            assert sequences.ids[at:end].tolist() == expected
            own = tokens.sequence == row
            assert np.array_equal(tokens.behaviour[own].numpy(), response.behaviour)
            assert tokens.advantages[own].unique().numel() <= 1
            at = end
        assert len(tokens.behaviour) == int(sequences.responses.sum())
        total += float(tokens.weights.sum())
    assert total == pytest.approx(1.0, abs=1e-4)


def test_a_micro_batch_is_filled_with_tokens_for_nothing_is_padded() -> None:
    made = responses([group("a", [97, 47], [0.0, 1.0]), group("b", [27, 17], [0.0, 1.0])], config())
    cuts = micro_batches(made, 3, config(max_tokens_per_gpu=200))
    assert [cut.batch.sequences.lengths.tolist() for cut in cuts] == [[100, 50, 30, 20]]


@pytest.mark.parametrize(
    ("count", "size", "parts"),
    [(16, None, [16]), (16, 8, [8, 8]), (18, 8, [8, 10]), (20, 8, [8, 8, 4]), (5, 8, [5]), (0, 8, [])],
)
def test_optimiser_steps_take_all_samples(count: int, size: int | None, parts: list[int]) -> None:
    made: list[TrainingSample] = responses([group(f"g{i}", [3], [1.0]) for i in range(count)], config())
    cut = updates(made, size)
    assert [len(part) for part in cut] == parts
    assert [r for part in cut for r in part] == made
