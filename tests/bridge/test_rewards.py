"""Rewards: values, group rewards, exceptions, time-outs, deaths; each in real processes."""

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from trainer_bridge.prompt import TrainingPrompt
from trainer_bridge.rewards import RewardError, Rewards, RewardSample, Score, math_answer

HERE = Path(__file__).with_name("reward_functions.py")
PATIENCE_S = 240.0


def samples(count: int = 4) -> list[RewardSample]:
    return [RewardSample("text", [5] * (i + 1), {"type": "stop"}, i) for i in range(count)]


def prompt(**fields: Any) -> TrainingPrompt:
    return TrainingPrompt(**{"id": "e0-0", "content": "1 + 1 =", "label": "2", "metadata": None, **fields})


@pytest.fixture
def rewards() -> Iterator[Callable[..., Rewards]]:
    made: list[Rewards] = []

    def make(name: str, timeout: float = 120.0, **options: Any) -> Rewards:
        made.append(Rewards(f"{HERE}:{name}", 1, timeout, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def scores(pool: Rewards, asked: TrainingPrompt | None = None, count: int = 4) -> list[Score]:
    return pool.submit(samples(count), asked or prompt()).result(PATIENCE_S)


def test_every_sample_has_its_own(rewards: Callable[..., Rewards]) -> None:
    assert [score.reward for score in scores(rewards("length"))] == [1, 2, 3, 4]


def test_no_samples(rewards: Callable[..., Rewards]) -> None:
    assert scores(rewards("length"), count=0) == []


def test_an_exception_masks_that_sample_alone(rewards: Callable[..., Rewards]) -> None:
    told = scores(rewards("odd_index_fails"))
    assert [score.reward for score in told] == [1, None, 1, None]
    assert "no opinion" in told[1].problem


def test_a_timeout_masks_that_sample_and_the_next_call_works(rewards: Callable[..., Rewards]) -> None:
    pool = rewards("hangs", timeout=12.0)
    told = scores(pool, count=3)
    assert [score.reward for score in told] == [1, None, 1]
    assert "12 s" in told[1].problem


def test_a_dead_process_is_replaced(rewards: Callable[..., Rewards]) -> None:
    told = scores(rewards("dies"), count=2)
    assert [score.reward for score in told] == [None, 2]
    assert "died" in told[0].problem


def test_a_failure_is_tried_once_more(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    asked = prompt(metadata=str(tmp_path / "asked"))
    assert [score.reward for score in scores(rewards("second_try"), asked, 1)] == [3]


def test_what_is_no_number_is_no_reward(rewards: Callable[..., Rewards]) -> None:
    assert [score.reward for score in scores(rewards("not_a_number"))] == [None, None, None, 0.5]


def test_a_number_beyond_a_float_is_no_reward(rewards: Callable[..., Rewards]) -> None:
    told = scores(rewards("beyond_a_float"), count=3)
    assert [score.reward for score in told] == [1, None, 1]
    assert "OverflowError" in told[1].problem


def test_a_value_that_only_its_worker_can_read_is_no_reward(rewards: Callable[..., Rewards]) -> None:
    """Its class is in a module of the worker's own: the trainer's process cannot unpickle what it sends."""
    told = scores(rewards("of_a_class_of_its_own"), count=3)
    assert [score.reward for score in told] == [1, None, 1]
    assert "cannot be read" in told[1].problem


def test_scores_that_nobody_will_compute_any_more_are_not_waited_for(rewards: Callable[..., Rewards]) -> None:
    pool = rewards("hangs", timeout=1.0)
    told = pool.submit([samples(2)[1]] * 3, prompt())
    pool.close()
    with pytest.raises(CancelledError):
        told.result(PATIENCE_S)


def test_a_group_reward_gives_one_for_each(rewards: Callable[..., Rewards]) -> None:
    assert [score.reward for score in scores(rewards("ranks", of_groups=True))] == [0, 1, 2, 3]


def test_a_group_reward_of_another_length_masks_all(rewards: Callable[..., Rewards]) -> None:
    told = scores(rewards("too_few", of_groups=True))
    assert [score.reward for score in told] == [None] * 4
    assert "1 rewards for 4 samples" in told[0].problem


def test_a_function_that_is_not_there_ends_the_start() -> None:
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
def test_math_answers(text: str, label: str, reward: float) -> None:
    assert math_answer(RewardSample(text, [1], {}, 0), prompt(label=label)) == reward
