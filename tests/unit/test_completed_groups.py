"""The content of finished samples is stored until exactly one reply takes it."""

import asyncio
from typing import Any

import numpy as np
import pytest

from sglang_april.api import messages
from sglang_april.http.completed_groups import (
    CompletedGroups,
    GroupSlice,
    MissingSampleError,
    visible_text,
)
from sglang_april.http.reply import Reply, delivery_stats
from tests.unit.scripted_engine import ScriptedEngine


def a_prompt(name: str = "a", **fields: Any) -> messages.Prompt:
    return messages.Prompt(name, b"\1\0\0\0", 2, 0, 0, **fields)


def a_sample(
    name: str = "a", index: int = 0, run: str = "r", text: str = "ab", **fields: Any
) -> messages.FinishedSample:
    return messages.FinishedSample(
        run=run,
        id=name,
        incarnation=0,
        index=index,
        output_ids=np.array([ord(c) for c in text], "<i4").tobytes(),
        logprobs=np.zeros(len(text), "<f4").tobytes(),
        spans=fields.pop("spans", [messages.Span(0, len(text), 0, "fresh")]),
        finish_reason=fields.pop("finish_reason", {"type": "length", "length": len(text)}),
        seed=0,
        **fields,
    )


def in_loop(scenario: Any) -> None:
    async def run() -> None:
        def decode(prompt: messages.Prompt, sample: messages.FinishedSample) -> "asyncio.Future[str | None]":
            future = asyncio.get_running_loop().create_future()
            future.set_result(f"{prompt.id}{sample.index}")
            return future

        outcome = scenario(CompletedGroups(decode))
        if outcome is not None:
            await outcome

    asyncio.run(run())


def test_a_sample_is_delivered_once() -> None:
    def scenario(groups: CompletedGroups) -> None:
        groups.add_prompts("r", [a_prompt()])
        groups.add(a_sample(index=1))
        groups.add(a_sample(index=0))
        (part,) = groups.take("r", [messages.Delivery("a", 0, [0, 1], True)])
        assert [done.sample.index for done in part.done] == [0, 1]
        assert not len(groups)
        with pytest.raises(MissingSampleError):
            groups.take("r", [messages.Delivery("a", 0, [0], True)])

    in_loop(scenario)


def test_missing_sample_leaves_the_store_unchanged() -> None:
    def scenario(groups: CompletedGroups) -> None:
        groups.add_prompts("r", [a_prompt("a"), a_prompt("b")])
        groups.add(a_sample("a"))
        with pytest.raises(MissingSampleError, match=r"\[1\] of prompt 'b'"):
            groups.take("r", [messages.Delivery("a", 0, [0], True), messages.Delivery("b", 0, [1], True)])
        assert groups.samples == 1

    in_loop(scenario)


def test_partial_delivery_keeps_the_rest_of_the_group() -> None:
    def scenario(groups: CompletedGroups) -> None:
        groups.add_prompts("r", [a_prompt()])
        groups.add(a_sample(index=0))
        groups.take("r", [messages.Delivery("a", 0, [0], False)])
        assert (len(groups), groups.samples) == (1, 0)
        groups.add(a_sample(index=1))
        assert groups.take("r", [messages.Delivery("a", 0, [1], True)])[0].complete
        assert not len(groups)

    in_loop(scenario)


def test_runs_are_separate_and_a_drop_removes_only_named_groups() -> None:
    def scenario(groups: CompletedGroups) -> None:
        groups.add_prompts("r", [a_prompt("a"), a_prompt("b")])
        groups.add_prompts("s", [a_prompt("a")])
        for name, run in (("a", "r"), ("b", "r"), ("a", "s")):
            groups.add(a_sample(name, run=run))
        groups.remove("r", ["a"])
        assert groups.add(a_sample("a", 1, run="r")) is None
        assert groups.samples == 2
        groups.remove("r", ["b"])
        assert groups.samples == 1
        assert groups.take("s", [messages.Delivery("a", 0, [0], True)])

    in_loop(scenario)


@pytest.mark.parametrize(
    ("finish_reason", "no_trim", "text"),
    [
        ({"type": "stop", "matched": ord("c")}, False, "ab"),
        ({"type": "stop", "matched": ord("c")}, True, "abc"),
        ({"type": "stop", "matched": "bc"}, False, "a"),
        ({"type": "stop", "matched": "bc"}, True, "abc"),
        ({"type": "stop", "matched": "b"}, True, "ab"),
        ({"type": "stop", "matched": "zz"}, False, "abc"),
        ({"type": "length", "length": 3}, False, "abc"),
        ({"type": "abort", "message": "x"}, False, "abc"),
    ],
)
def test_text_is_trimmed_as_in_sglang(finish_reason: dict[str, Any], no_trim: bool, text: str) -> None:
    sample = a_sample(text="abc", finish_reason=finish_reason)
    assert visible_text(ScriptedEngine().decode, a_prompt(no_stop_trim=no_trim), sample) == text


def test_sample_without_tokens_has_empty_text() -> None:
    assert visible_text(ScriptedEngine().decode, a_prompt(), a_sample(text="", spans=[])) == ""


def parts_with(*spans: list[messages.Span]) -> list[GroupSlice]:
    async def build() -> list[GroupSlice]:
        groups = CompletedGroups(lambda prompt, sample: asyncio.get_running_loop().create_future())
        groups.add_prompts("r", [a_prompt()])
        for i, of_sample in enumerate(spans):
            groups.add(a_sample(index=i, text="x" * of_sample[-1].end, spans=of_sample))
        return groups.take("r", [messages.Delivery("a", 0, list(range(len(spans))), True)])

    return asyncio.run(build())


def test_delivery_statistics() -> None:
    parts = parts_with(
        [messages.Span(0, 4, 1, "fresh"), messages.Span(4, 10, 2, "kept")],
        [messages.Span(0, 1, 1, "fresh"), messages.Span(1, 5, 2, "recomputed"), messages.Span(5, 10, 2, "fresh")],
    )
    stats = delivery_stats(parts, policy_version=2)
    assert (stats["groups"], stats["samples"], stats["tokens"]) == (1, 2, 20)
    assert stats["tokens_by_version"] == {"1": 5, "2": 15}
    assert stats["tokens_by_kv"] == {"fresh": 10, "kept": 6, "recomputed": 4}
    assert stats["off_policy_share"] == 0.25
    assert stats["hybrid_share"] == 0.3
    assert stats["length"]["mean"] == 10


def test_statistics_of_an_empty_delivery() -> None:
    stats = delivery_stats([], 0)
    assert (stats["tokens"], stats["off_policy_share"], stats["length"]) == (0, 0.0, {})


def test_a_reply_waits_for_its_texts_and_warns_of_truncated_sampling() -> None:
    def scenario(groups: CompletedGroups) -> Any:
        groups.add_prompts("r", [a_prompt(truncates=True)])
        groups.add(a_sample())
        parts = groups.take("r", [messages.Delivery("a", 0, [0], True)])
        lengths = np.array([3, 5], "<i4").tobytes()
        ended = messages.RoundEnded("x", "r", 3, "quota", [], {}, {"warnings": ["first"]}, lengths)

        async def check() -> None:
            reply = await Reply.build(ended, parts)
            assert reply.stats["warnings"][0] == "first"
            carried = reply.stats["carried_length"]
            assert (carried["min"], carried["mean"], carried["max"]) == (3, 4.0, 5)
            assert "top_k" in reply.stats["warnings"][1]
            assert b'"text":"a0"' in reply.encode(packed=False)
            assert reply.nbytes > (await Reply.build(ended, [])).nbytes > 0

        return check()

    in_loop(scenario)
