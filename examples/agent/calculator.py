"""An agent that adds a list of numbers with a calculator that adds two numbers per call.

    user       17 42 5
    assistant  add 17 42
    tool       59
    assistant  add 59 5
    tool       64
    assistant  answer 64

A list of n numbers takes n turns: n − 1 calls, and the answer. Most lists have three or four numbers and a few have
eight, so the number of turns has a long tail, and so has the time that the calculator takes. The reward is the share
of the list that the answer contains: 1.0 for the sum of all numbers, k/n for the sum of the first k, else 0.0.

The tiny model has one token per word (`train_checkpoint.py`), so that all texts convert to the ids they came from.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from trainer_bridge.agents import AgentTask

FEWEST, MOST = 3, 8
"""Numbers of a list."""
LARGEST = 60
"""Numbers are 1 … LARGEST, so that no sum of a list exceeds `LARGEST_SUM`."""
LARGEST_SUM = MOST * LARGEST
MAX_TURNS = 10
"""Maximum number of turns; a trajectory without an answer by then gets no reward."""
TOOL_SECONDS = 0.05
"""Median time of a call of the calculator."""
TAIL = 2.0
"""Standard deviation of the logarithm of that time: one call in forty takes longer than fifty times the median, as
calls of searches and sandboxes do."""
LONGEST_SECONDS = 5.0
"""Limit of that time, as a tool's timeout sets it."""


def draw_numbers(rng: random.Random) -> list[int]:
    """A list of distinct numbers: three of them with probability 0.4, eight with 0.07, after a truncated Pareto law.

    No sum of its first numbers is a number of the list: the model finds its place by the number that it added last.
    """
    while True:
        ceiling = 1.0 - FEWEST / (MOST + 1)
        length = int(FEWEST / (1.0 - rng.random() * ceiling))
        numbers = rng.sample(range(1, LARGEST + 1), length)
        if set(itertools.accumulate(numbers[1:], initial=numbers[0])).isdisjoint(numbers[1:]):
            return numbers


def problems(seed: int) -> Iterator[list[int]]:
    """An endless stream of lists, the same for the same seed."""
    rng = random.Random(f"calculator-{seed}")
    while True:
        yield draw_numbers(rng)


def write_prompts(path: Path, lists: Iterable[list[int]]) -> Path:
    """Lists as the trainer reads prompts: a JSON row each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"input": " ".join(map(str, numbers))}) + "\n" for numbers in lists))
    return path


def calculate(call: str) -> str:
    """The tool: the sum for ``add A B``, and ``error`` for everything else."""
    match call.split():
        case ["add", a, b] if a.isdecimal() and b.isdecimal() and int(a) + int(b) <= LARGEST_SUM:
            return str(int(a) + int(b))
    return "error"


def reward(numbers: list[int], answer: int) -> float:
    """The share of the list whose sum the answer is."""
    for count, total in enumerate(itertools.accumulate(numbers), 1):
        if answer == total:
            return count / len(numbers)
    return 0.0


def tool_seconds(task: str, turn: int) -> float:
    """How long a call takes: log-normal up to a limit, the same in every run for the same list and turn."""
    numbers = task.rpartition(".")[0]  # `<list>.<trajectory>`
    return min(LONGEST_SECONDS, TOOL_SECONDS * random.Random(f"{numbers}-{turn}").lognormvariate(0.0, TAIL))


async def agent(task: AgentTask, client: AsyncOpenAI) -> float:
    """One trajectory: turns until the model answers. Returns its reward."""
    numbers = [int(word) for word in task.content.split()]
    messages = [{"role": "user", "content": task.content}]
    for turn in range(MAX_TURNS):
        reply = await client.chat.completions.create(model="default", messages=messages, **task.sampling)  # type: ignore[arg-type]
        answer = reply.choices[0].message.content or ""
        match answer.split():
            case ["answer", word] if word.isdecimal():
                return reward(numbers, int(word))
        await asyncio.sleep(tool_seconds(task.id, turn))
        messages += [{"role": "assistant", "content": answer}, {"role": "tool", "content": calculate(answer)}]
    return 0.0
