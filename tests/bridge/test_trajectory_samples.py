"""Records of trajectories become sequences: every drawn token is in the loss once, and nothing else is."""

from typing import Any

import numpy as np
import pytest

from sglang_april.client.types import RecordedTrajectory, read_trajectory
from trainer_bridge.batch import PROVENANCE
from trainer_bridge.config import Config
from trainer_bridge.samples import pack_micro_batches, training_samples
from trainer_bridge.trajectory_samples import TrajectoryGroup

NAN = None
"""How JSON has the logprob of a token from outside."""


def config(**fields: Any) -> Config:
    return Config.from_fields({"hf_checkpoint": "m", "prompt_data": "d", **fields})


def leg(number: int, finish: str = "stop", **fields: Any) -> dict[str, Any]:
    empty = {"prompt_ids": [], "output_ids": [], "logprobs": [], "spans": [], "reused": 0, "prefilled": 0}
    end = {"finish_reason": {"type": finish}}
    return {"leg": number, "rid": f"r{number}", "parent": None, "shared": 0, **empty, **end, **fields}


def branch(ids: list[int], drawn: list[tuple[int, int]], spans: list[tuple[int, int, int, str]], **fields: Any) -> Any:
    inside = {i for start, end in drawn for i in range(start, end)}
    return {
        "shared": 0,
        "ids": ids,
        "drawn": [list(pair) for pair in drawn],
        "logprobs": [-ids[i] / 100 if i in inside else NAN for i in range(len(ids))],
        "spans": [{"start": a, "end": b, "version": v, "kv": kv} for a, b, v, kv in spans],
        **fields,
    }


def trajectory(
    branches: list[Any], legs: int | list[Any], reward: float | None = 1.0, index: int = 0
) -> RecordedTrajectory:
    """`legs`: those of the record, or how many."""
    legs = [leg(i) for i in range(legs)] if isinstance(legs, int) else legs
    fields = {"id": f"e0-0.{index}.x", "run": "r", "group": "g", "reward": reward, "metadata": {"index": index}}
    return read_trajectory(fields | {"legs": legs, "branches": branches})


TWO_TURNS = branch(
    [1, 2, 3, 10, 11, 4, 5, 12, 13, 14], [(3, 5), (7, 10)], [(3, 5, 6, "fresh"), (7, 8, 6, "fresh"), (8, 10, 7, "kept")]
)
"""Prompt of three, two drawn, two of a tool, three drawn, the last two under the next policy."""


def test_the_loss_covers_what_the_model_drew_and_not_what_a_tool_returned() -> None:
    (sample,) = training_samples([TrajectoryGroup("p", [trajectory([{**TWO_TURNS, "legs": [0, 1]}], 2)])], config())
    assert sample.prompt_ids.tolist() == [1, 2, 3]
    assert sample.output_ids.tolist() == [10, 11, 4, 5, 12, 13, 14]
    assert sample.loss_mask.tolist() == [True, True, False, False, True, True, True]
    assert np.allclose(sample.behaviour[sample.loss_mask], [-0.10, -0.11, -0.12, -0.13, -0.14])
    assert np.isnan(sample.behaviour[~sample.loss_mask]).all()
    assert sample.age(7)[sample.loss_mask].tolist() == [1, 1, 1, 0, 0]
    assert [PROVENANCE[k] for k in sample.kv[sample.loss_mask]] == ["fresh", "fresh", "fresh", "kept", "kept"]
    assert (sample.prompt_id, sample.index, sample.turns, sample.drawn, len(sample)) == ("p", 0, 2, 5, 10)


def test_a_branch_is_trained_on_from_its_first_own_token() -> None:
    """The second branch shares the prompt and the first turn: these tokens are in the loss of the first one only."""
    first = {**TWO_TURNS, "legs": [0, 1]}
    second = branch([1, 2, 3, 10, 11, 9, 20], [(3, 5), (6, 7)], [(3, 5, 6, "fresh"), (6, 7, 7, "fresh")], legs=[0, 2])
    samples = training_samples([TrajectoryGroup("p", [trajectory([first, {**second, "shared": 5}], 3)])], config())
    assert [sample.prompt_ids.tolist() for sample in samples] == [[1, 2, 3], [1, 2, 3, 10, 11, 9]]
    assert samples[1].output_ids.tolist() == [20]
    assert [sample.turns for sample in samples] == [2, 1]
    assert sum(sample.drawn for sample in samples) == 6


def test_a_token_that_was_drawn_after_it_had_come_from_outside_is_trained_on() -> None:
    """The first leg began behind a given token, and the second one drew that token itself."""
    first = branch([1, 2, 10, 11], [(3, 4)], [(3, 4, 6, "fresh")], legs=[0])
    second = branch([1, 2, 10, 12], [(2, 4)], [(2, 4, 6, "fresh")], legs=[1], shared=3)
    samples = training_samples([TrajectoryGroup("p", [trajectory([first, second], 2)])], config())
    assert [sample.output_ids.tolist() for sample in samples] == [[11], [10, 12]]
    assert [sample.loss_mask.tolist() for sample in samples] == [[True], [True, True]]


def test_a_branch_without_own_tokens_is_no_sequence() -> None:
    first = {**TWO_TURNS, "legs": [0, 1]}
    second = branch([1, 2, 3, 10], [(3, 4)], [(3, 4, 6, "fresh")], legs=[0, 2])
    assert (
        len(training_samples([TrajectoryGroup("p", [trajectory([first, {**second, "shared": 4}], 3)])], config())) == 1
    )


def test_a_number_that_a_refused_request_has_used_is_no_leg() -> None:
    """The legs of a record are numbered in order of arrival, and a request that SGLang refuses is not among them."""
    record = trajectory([{**TWO_TURNS, "legs": [0, 2]}], [leg(0), leg(2, "length")])
    (sample,) = training_samples([TrajectoryGroup("p", [record])], config())
    assert (sample.finish, sample.turns) == ("length", 2)


def test_branches_of_a_trajectory_weigh_as_one_response() -> None:
    """With a mean over responses, a trajectory of two branches counts as much as one of a single branch."""
    first = {**TWO_TURNS, "legs": [0, 1]}
    second = branch([1, 2, 3, 9, 20], [(4, 5)], [(4, 5, 7, "fresh")], legs=[2], shared=3)
    group = TrajectoryGroup("p", [trajectory([first, second], 3, 1.0), trajectory([first], 2, 0.0, index=1)])
    samples = training_samples([group], config())
    assert [round(sample.advantage, 3) for sample in samples] == [0.707, 0.707, -0.707]
    (packed,) = pack_micro_batches(samples, 7, config())
    weights = packed.batch.tokens.weights.numpy()
    of = packed.batch.tokens.sequence.numpy()
    by_sample = {packed.members[row]: weights[of == row] for row in range(3)}
    assert by_sample[0].tolist() == pytest.approx([1 / 12, 1 / 12, 0, 0, 1 / 12, 1 / 12, 1 / 12])
    assert by_sample[1].tolist() == pytest.approx([1 / 12])
    assert by_sample[2].sum() == pytest.approx(0.5)


def test_a_trajectory_without_a_reward_is_masked_and_not_in_the_baseline() -> None:
    one = {**TWO_TURNS, "legs": [0, 1]}
    rewards = [1.0, None, 0.0]
    group = TrajectoryGroup("p", [trajectory([one], 2, reward, index) for index, reward in enumerate(rewards)])
    samples = training_samples([group], config(normalize_advantages=False))
    assert [sample.masked for sample in samples] == [False, True, False]
    assert [sample.advantage for sample in samples] == [0.5, 0.0, -0.5]


def test_spans_must_cover_what_was_drawn() -> None:
    broken = branch([1, 10, 11], [(1, 3)], [(1, 2, 6, "fresh")], legs=[0])
    with pytest.raises(ValueError, match=r"e0-0\.0\.x.*spans"):
        training_samples([TrajectoryGroup("p", [trajectory([broken], 1)])], config())
