"""A small real task with long-tailed answer lengths: sort a list of distinct numbers.

A prompt is ``<bos> 17 4 9 … <sort>``; the answer is the same numbers in rising order and ``<eos>``. Every number is one
token, so the answer is exactly one token longer than the list, and the lengths of the lists decide the lengths of the
answers: a truncated Pareto law, most lists short and a few of them twenty times the median. A trained model ends its
answers by itself, so a batch waits for its few longest answers.

Token ids in and token ids out: ``Problem.prompt`` goes to the server as ``input_ids``, ``score`` judges ``output_ids``.
As prompt data of the trainer bridge: ``write_prompts``, and ``reward: examples.sorting_task:reward``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_bridge.rewards import RewardSample, TrainingPrompt

PAD, BOS, EOS, SORT = 0, 1, 2, 3
FIRST_NUMBER = 4
VOCAB_SIZE = 512
NUMBERS = VOCAB_SIZE - FIRST_NUMBER
"""Number of different numbers: 0 … NUMBERS - 1."""


@dataclass(frozen=True)
class ListLengths:
    """Distribution of list lengths: a Pareto law between ``shortest`` and ``longest``.

    With the defaults the median is about 16 and the longest list is 20 times that.
    """

    shortest: int = 8
    longest: int = 320
    alpha: float = 1.0

    def draw(self, rng: random.Random) -> int:
        """One length by inversion of the truncated law: no probability mass piles up at the cap."""
        ceiling = 1.0 - (self.shortest / (self.longest + 1)) ** self.alpha
        return int(self.shortest * (1.0 - rng.random() * ceiling) ** (-1.0 / self.alpha))


@dataclass(frozen=True)
class Problem:
    """One list to sort, as token ids."""

    id: str
    prompt: list[int]
    answer: list[int]


def make_problem(rng: random.Random, length: int, name: str = "") -> Problem:
    """A list of ``length`` distinct numbers out of a window half as wide again, shuffled."""
    window = min(NUMBERS, length + (length + 1) // 2)
    start = rng.randrange(NUMBERS - window + 1)
    numbers = rng.sample(range(start, start + window), length)
    tokens = [FIRST_NUMBER + number for number in numbers]
    return Problem(name, [BOS, *tokens, SORT], [*sorted(tokens), EOS])


def problems(seed: int, lengths: ListLengths | None = None) -> Iterator[Problem]:
    """An endless stream of problems, the same for the same seed, with ids ``s<seed>-<count>``."""
    rng = random.Random(f"sorting-{seed}")
    lengths = lengths or ListLengths()
    count = 0
    while True:
        yield make_problem(rng, lengths.draw(rng), f"s{seed}-{count}")
        count += 1


def score(problem: Problem, output_ids: Sequence[int]) -> float:
    """The reward: the share of positions that are right, over the longer of answer and output; 1.0 means exact."""
    right = sum(a == b for a, b in zip(problem.answer, output_ids, strict=False))
    return right / max(len(problem.answer), len(output_ids))


def exact(problem: Problem, output_ids: Sequence[int]) -> bool:
    """Whether the output equals the answer."""
    return list(output_ids) == problem.answer


def write_prompts(path: Path, given: Iterable[Problem]) -> Path:
    """Problems as the trainer bridge reads prompts: a JSON row each, the answer as its label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"input": one.prompt, "label": one.answer}) + "\n" for one in given))
    return path


def reward(sample: RewardSample, prompt: TrainingPrompt) -> float:
    """``score`` with the signature that the trainer bridge calls."""
    return score(Problem(prompt.id, prompt.content, prompt.label), sample.output_ids)
