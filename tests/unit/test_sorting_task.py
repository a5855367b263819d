"""The sorting task: long-tailed lengths, answers that end, a reward that distinguishes exact from nearly right."""

import itertools
import random
import statistics

from examples.sorting_task import (
    BOS,
    EOS,
    FIRST_NUMBER,
    SORT,
    VOCAB_SIZE,
    ListLengths,
    exact,
    make_problem,
    problems,
    score,
)


def test_lengths_have_a_long_tail() -> None:
    lengths, rng = ListLengths(), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert min(drawn) == lengths.shortest
    assert max(drawn) <= lengths.longest
    median = statistics.median(drawn)
    assert max(drawn) >= 15 * median
    # A long list is rare, but sixteen prompts seldom come without one that is four times the median.
    long_share = sum(length >= 4 * median for length in drawn) / len(drawn)
    assert 0.05 < long_share < 0.2


def test_a_problem_is_a_shuffled_list_and_its_sorted_answer() -> None:
    for length in (1, 2, 8, 320):
        problem = make_problem(random.Random(length), length)
        assert problem.prompt[0] == BOS
        assert problem.prompt[-1] == SORT
        numbers = problem.prompt[1:-1]
        assert len(set(numbers)) == len(numbers) == length
        assert all(FIRST_NUMBER <= token < VOCAB_SIZE for token in numbers)
        assert problem.answer == [*sorted(numbers), EOS]


def test_streams_repeat_for_a_seed_and_ids_are_unique() -> None:
    first = list(itertools.islice(problems(3), 200))
    assert first == list(itertools.islice(problems(3), 200))
    assert first != list(itertools.islice(problems(4), 200))
    assert len({problem.id for problem in first}) == 200


def test_score() -> None:
    problem = make_problem(random.Random(1), 9)
    assert score(problem, problem.answer) == 1.0
    assert exact(problem, problem.answer)
    without_end = problem.answer[:-1]
    assert score(problem, without_end) == 0.9
    assert not exact(problem, without_end)
    too_long = [*problem.answer, EOS]
    assert score(problem, too_long) == 10 / 11
    assert not exact(problem, too_long)
    assert score(problem, []) == 0.0
