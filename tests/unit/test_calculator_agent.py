"""The agent example: its lists, tool and reward, the agent function, and the words of its tiny model."""

import asyncio
import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agent import calculator
from examples.agent.calculator import FEWEST, LARGEST_SUM, MOST, agent, calculate, problems, reward, tool_seconds
from examples.april_demo.settings import CHECKPOINTS


def test_lists_have_a_long_tail_and_repeat_for_a_seed() -> None:
    drawn = list(itertools.islice(problems(3), 3000))
    assert drawn[:50] == list(itertools.islice(problems(3), 50))
    lengths = Counter(map(len, drawn))
    assert set(lengths) == set(range(FEWEST, MOST + 1))
    assert lengths[FEWEST] > 4 * lengths[MOST] > 200
    for numbers in drawn:
        assert len(set(numbers)) == len(numbers)
        assert sum(numbers) <= LARGEST_SUM
        assert set(itertools.accumulate(numbers)).isdisjoint(numbers[1:])


@pytest.mark.parametrize(
    ("call", "result"), [("add 2 3", "5"), (f"add {LARGEST_SUM} 1", "error"), ("add 2", "error"), ("", "error")]
)
def test_the_tool_adds_two_numbers(call: str, result: str) -> None:
    assert calculate(call) == result


def test_the_reward_is_the_share_of_the_list_that_was_added() -> None:
    assert [reward([5, 7, 9, 1], answer) for answer in (5, 12, 21, 22, 13)] == [0.25, 0.5, 0.75, 1.0, 0.0]


def test_a_call_takes_as_long_in_every_run_and_few_take_long() -> None:
    seconds = sorted(tool_seconds(f"e0-{i}.0", 1) for i in range(2000))
    assert seconds[1000] == pytest.approx(calculator.TOOL_SECONDS, rel=0.15)
    assert seconds[-20] == seconds[-1] == calculator.LONGEST_SECONDS
    assert tool_seconds("e0-7.2", 1) == tool_seconds("e0-7.3", 1)
    assert tool_seconds("e0-7.2", 1) == tool_seconds("e0-7.2", 1) != tool_seconds("e0-7.2", 2)


class ScriptedClient:
    """Answers with one line after another."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.asked: list[list[dict[str, str]]] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, model: str, messages: list[dict[str, str]], **sampling: Any) -> Any:
        assert sampling == {"temperature": 1.0}
        self.asked.append(list(messages))
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.lines.pop(0)))])


def run(client: ScriptedClient, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(calculator, "TOOL_SECONDS", 0.0)
    task = SimpleNamespace(id="e0-0.0", content="17 42 5", sampling={"temperature": 1.0})
    return asyncio.run(agent(task, client))  # type: ignore[arg-type]


def test_the_agent_calls_the_tool_until_the_model_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient("add 17 42", "add 59 5", "answer 64")
    assert run(client, monkeypatch) == 1.0
    assert [message["role"] for message in client.asked[2]] == ["user", "assistant", "tool", "assistant", "tool"]
    assert client.asked[2][2::2] == [{"role": "tool", "content": "59"}, {"role": "tool", "content": "64"}]


def test_a_malformed_call_gets_an_error_and_the_agent_ends_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient(*["42 add"] * 20)
    assert run(client, monkeypatch) == 0.0
    assert len(client.asked) == calculator.MAX_TURNS
    assert client.asked[1][-1] == {"role": "tool", "content": "error"}


def test_the_text_of_a_turn_converts_to_the_ids_that_were_drawn() -> None:
    """So a turn extends the one before, and no branch begins."""
    pytest.importorskip("transformers")
    from transformers import AutoTokenizer

    from examples.agent.train_checkpoint import demonstration

    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "calculator")
    ids, drawn = demonstration([17, 42, 5], random.Random(0), 0.0)
    messages = [
        {"role": "user", "content": "17 42 5"},
        {"role": "assistant", "content": "add 17 42"},
        {"role": "tool", "content": "59"},
        {"role": "assistant", "content": "add 59 5"},
        {"role": "tool", "content": "64"},
    ]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt == ids[: len(prompt)]
    assert tokenizer.decode([t for t, d in zip(ids, drawn, strict=True) if d], skip_special_tokens=True).split() == (
        ["add", "17", "42", "add", "59", "5", "answer", "64"]
    )
