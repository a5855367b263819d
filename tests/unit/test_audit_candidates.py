"""Which tokens of a sample a plain prefill can rescore, and how they are compared."""

import sys
from typing import Any

import numpy as np
import pytest

from sglang_april.api.requests import RolloutBody, SamplingBody
from sglang_april.config import AprilConfig
from sglang_april.http import audit as audit_module
from sglang_april.http.audit import Candidate, candidate_of
from sglang_april.http.prepare import open_round, round_spec
from tests.unit.finished_samples import finished
from tests.unit.scripted_engine import ScriptedEngine


def candidate(*args: Any, longest: int = 1000, **named: Any) -> Any:
    return candidate_of(*finished(*args, **named), longest)


def positions(*args: Any, **named: Any) -> list[int]:
    return list(candidate(*args, **named).positions)


def test_tokens_of_the_current_version_that_are_not_on_kept_kv_are_compared() -> None:
    assert positions([(0, 4, 2, "fresh")]) == [0, 1, 2, 3]
    assert positions([(0, 2, 1, "fresh"), (2, 4, 2, "recomputed")]) == [2, 3]
    assert positions([(0, 1, 2, "kept"), (1, 2, 2, "recomputed"), (2, 3, 2, "kept")]) == [1]
    assert candidate([(0, 2, 1, "fresh"), (2, 4, 2, "kept")]) == "kept KV"
    assert candidate([(0, 2, 1, "fresh")], rescore="regex") == "regex"


def test_a_prefill_is_no_longer_than_the_server_takes() -> None:
    assert positions([(0, 8, 0, "fresh")], longest=7) == [0, 1, 2, 3]
    assert candidate([(0, 8, 0, "fresh")], longest=3) == "length"


def test_the_prefill_ends_with_the_last_compared_token_and_begins_before_the_first() -> None:
    ids, start = candidate([(0, 2, 1, "fresh"), (2, 4, 2, "recomputed"), (4, 6, 2, "kept")]).request()
    assert ids == [1, 2, 3, 10, 11, 12, 13]
    assert ids[start + 1 :] == [12, 13]


def test_a_difference_is_the_worst_mean_of_a_window() -> None:
    drawn = np.zeros(64)
    drawn[40:56] = -1.0
    found: Candidate = candidate([(0, 64, 0, "fresh")], logprobs=drawn)
    assert found.compare([0.0] * 64) == (1.0, 40)
    assert found.compare(list(drawn)) == (0.0, 0)
    one_token = candidate([(0, 64, 0, "fresh")], logprobs=np.eye(64)[5])
    assert one_token.compare([0.0] * 64)[0] == 1 / audit_module.WINDOW
    assert candidate([(0, 2, 0, "fresh")], logprobs=[0, float("nan")]).compare([0.0, 0.0])[0] == float("inf")
    broken = candidate([(0, 64, 0, "fresh")], logprobs=np.where(np.arange(64) == 30, np.nan, drawn))
    assert broken.compare([0.0] * 64) == (float("inf"), 30 - audit_module.WINDOW + 1)


def test_the_event_loop_compares_a_long_sample_without_a_loop_over_its_tokens() -> None:
    long, rescored, calls = candidate([(0, 5000, 0, "fresh")], logprobs=np.zeros(5000)), [0.0] * 5000, [0]

    def count(*_: object) -> None:
        calls[0] += 1

    sys.setprofile(count)
    try:
        long.compare(rescored)
    finally:
        sys.setprofile(None)
    assert calls[0] < 500


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, 1.0),
        ({"temperature": 0.7, "top_p": 0.9}, 0.7),
        ({"temperature": 0}, 1.0),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias"),
        ({"regex": "a+"}, "regex"),
    ],
)
def test_parameters_say_whether_a_prefill_gives_the_same_distribution(params: Any, expected: float | str) -> None:
    body = RolloutBody(sampling_params=SamplingBody(**params))
    body.prompts = [_prompt_body()]
    config = AprilConfig(quota=1)
    engine = ScriptedEngine(overlap=False)
    command = open_round(1, round_spec(body, "r", "", config), body, config, engine)
    assert command.prompts[0].rescore == expected


def _prompt_body() -> Any:
    from sglang_april.api.requests import PromptBody

    return PromptBody(id="a", input_ids=np.array([1, 2], "<i4").tobytes())
