"""Rewards in real worker processes: values, group rewards, exceptions, timeouts and crashes."""

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from trainer_bridge.rewards import RewardError, Rewards, RewardSample, Score, TrainingPrompt, math_answer

HERE = Path(__file__).with_name("reward_functions.py")
TIMEOUT_S = 240.0


def samples(count: int = 4) -> list[RewardSample]:
    return [RewardSample("text", [5] * (i + 1), {"type": "stop"}, i) for i in range(count)]


def prompt(**fields: Any) -> TrainingPrompt:
    return TrainingPrompt(**{"id": "e0-0", "content": "1 + 1 =", "label": "2", "metadata": None, **fields})


@pytest.fixture
def rewards() -> Iterator[Callable[..., Rewards]]:
    pools: list[Rewards] = []

    def make(name: str, timeout: float = 120.0, **options: Any) -> Rewards:
        pools.append(Rewards(f"{HERE}:{name}", 1, timeout, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def scores(pool: Rewards, of: TrainingPrompt | None = None, count: int = 4) -> list[Score]:
    return pool.submit(samples(count), of or prompt()).result(TIMEOUT_S)


def test_each_sample_gets_its_reward(rewards: Callable[..., Rewards]) -> None:
    assert [score.reward for score in scores(rewards("length"))] == [1, 2, 3, 4]


def test_no_samples_give_no_scores(rewards: Callable[..., Rewards]) -> None:
    assert scores(rewards("length"), count=0) == []


def test_exception_masks_only_that_sample(rewards: Callable[..., Rewards]) -> None:
    result = scores(rewards("odd_index_fails"))
    assert [score.reward for score in result] == [1, None, 1, None]
    assert "no opinion" in result[1].problem


def test_timeout_masks_only_that_sample(rewards: Callable[..., Rewards]) -> None:
    pool = rewards("hangs", timeout=12.0)
    result = scores(pool, count=3)
    assert [score.reward for score in result] == [1, None, 1]
    assert "12 s" in result[1].problem


def test_dead_process_is_replaced(rewards: Callable[..., Rewards]) -> None:
    result = scores(rewards("dies"), count=2)
    assert [score.reward for score in result] == [None, 2]
    assert "died" in result[0].problem


def test_failed_call_is_repeated_once(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    remembered = prompt(metadata=str(tmp_path / "called"))
    assert [score.reward for score in scores(rewards("second_try"), remembered, 1)] == [3]


def test_value_that_is_not_a_finite_number_is_no_reward(rewards: Callable[..., Rewards]) -> None:
    assert [score.reward for score in scores(rewards("not_a_number"))] == [None, None, None, 0.5]


def test_number_too_large_for_a_float_is_no_reward(rewards: Callable[..., Rewards]) -> None:
    result = scores(rewards("beyond_a_float"), count=3)
    assert [score.reward for score in result] == [1, None, 1]
    assert "OverflowError" in result[1].problem


def test_value_that_cannot_be_unpickled_is_no_reward(rewards: Callable[..., Rewards]) -> None:
    """Its class is in a module that only the worker can import."""
    result = scores(rewards("of_a_local_class"), count=3)
    assert [score.reward for score in result] == [1, None, 1]
    assert "cannot be read" in result[1].problem


def test_closing_the_pool_cancels_pending_scores(rewards: Callable[..., Rewards]) -> None:
    pool = rewards("hangs", timeout=1.0)
    result = pool.submit([samples(2)[1]] * 3, prompt())
    pool.close()
    with pytest.raises(CancelledError):
        result.result(TIMEOUT_S)


def test_group_reward_scores_each_sample(rewards: Callable[..., Rewards]) -> None:
    assert [score.reward for score in scores(rewards("ranks", per_group=True))] == [0, 1, 2, 3]


def test_group_reward_of_wrong_length_masks_all_samples(rewards: Callable[..., Rewards]) -> None:
    result = scores(rewards("too_few", per_group=True))
    assert [score.reward for score in result] == [None] * 4
    assert "1 rewards for 4 samples" in result[0].problem


def test_missing_function_is_refused_at_startup() -> None:
    with pytest.raises(RewardError, match="nowhere"):
        Rewards(f"{HERE}:nowhere", 1, 120.0)


@pytest.mark.parametrize(
    ("text", "label", "reward"),
    [
        ("so it is $\\boxed{\\frac{1}{2}}$", "0.5", 1.0),
        ("the answer is \\boxed{12}", "12", 1.0),
        ("the answer is \\boxed{13}", "12", 0.0),
        ("no idea", "12", 0.0),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
    ],
)
def test_math_answer_compares_the_last_answer_with_the_label(text: str, label: str, reward: float) -> None:
    assert math_answer(RewardSample(text, [1], {}, 0), prompt(label=label)) == reward
