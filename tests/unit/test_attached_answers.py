"""How answers and streams of attached requests find their description."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import FinishReasonDict
from sglang.srt.managers.schedule_batch import FINISH_LENGTH

from sglang_april.adapter.core import hooks_attached
from sglang_april.adapter.core.attach_request import DESCRIPTION, Attachment
from sglang_april.adapter.core.attached import described
from sglang_april.api.messages import AttachedEnded, EndedRequest, FinishedSample, LegEnded, Prompt, Span
from sglang_april.http import attached
from sglang_april.http.attached import AttachedRequests, read_description
from tests.unit.scripted_engine import service


def ended(rid: str) -> EndedRequest:
    return EndedRequest(rid, [Span(0, 2, 3, "fresh"), Span(2, 5, 4, "kept")], 4)


def test_a_description_may_come_before_or_after_the_answer() -> None:
    async def scenario() -> None:
        requests = AttachedRequests()
        requests.receive(ended("early"))
        assert (await requests.description("early"))["staleness"] == 1
        late = asyncio.ensure_future(requests.description("late"))
        await asyncio.sleep(0)
        requests.receive(ended("late"))
        assert (await late)["spans"][1] == {"start": 2, "end": 5, "version": 4, "kv": "kept"}

    asyncio.run(scenario())


def test_a_rid_is_in_use_until_the_answer_has_its_description() -> None:
    """SGLang forgets the request before: a second one with its rid would get the spans of the first."""
    obj: Any = SimpleNamespace(rid="a")
    attachment = Attachment("r", "t")

    async def scenario() -> None:
        requests = AttachedRequests()
        manager: Any = SimpleNamespace(
            april=SimpleNamespace(config=SimpleNamespace(attach=None), attached=requests),
            server_args=SimpleNamespace(disable_overlap_schedule=True),
            preferred_sampling_params=None,
        )
        first = asyncio.ensure_future(requests.description("a", leg=True))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="Duplicate request ID detected: a"):
            hooks_attached.generate(lambda *_: None, manager, obj)
        requests.receive(ended("a"))
        assert await first
        obj.rid = "a"  # a refusal takes it out
        hooks_attached.generate(lambda *_: None, manager, obj)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks_attached, "attach", lambda *_, **__: attachment)
        asyncio.run(scenario())


def test_an_answer_contains_the_description_unless_it_is_a_legs() -> None:
    """In a form that SGLang's messages can carry; the scheduler's own finish reason stays as it is."""

    def description(sample: Any, length: int) -> EndedRequest:
        return EndedRequest(sample.rid, [Span(0, length, 3, "fresh")], 4)

    runs: Any = SimpleNamespace(description=description)

    def finished(rid: str, leg: object) -> Any:
        sample = SimpleNamespace(rid=rid, group=SimpleNamespace(leg=leg))
        return SimpleNamespace(
            april=sample, output_ids_through_stop=[5, 6], finished_reason=FINISH_LENGTH(2), april_described=False
        )

    alone, leg = finished("a", None), finished("b", object())
    with described(runs, [alone, leg]):
        sent = msgspec.convert(alone.finished_reason.to_json(), FinishReasonDict)
        assert leg.finished_reason.to_json() == FINISH_LENGTH(2).to_json()
    assert sent.items() > FINISH_LENGTH(2).to_json().items()
    assert read_description(sent[DESCRIPTION]) == {
        "spans": [{"start": 0, "end": 2, "version": 3, "kv": "fresh"}],
        "policy_version": 4,
        "staleness": 1,
    }
    assert [one.finished_reason.to_json() for one in (alone, leg)] == [FINISH_LENGTH(2).to_json()] * 2
    assert (alone.april_described, leg.april_described) == (True, False)


def test_the_record_of_a_leg_describes_it_and_no_description_is_left_of_an_audited_request() -> None:
    """A later request with its `rid` would take it for its own."""

    async def scenario() -> None:
        april, engine = service()
        result = FinishedSample("run", "p", 0, 0, b"\0" * 8, b"\0" * 8, [Span(0, 2, 3, "kept")], {"type": "length"}, 7)
        engine.emit(LegEnded("run", "t", "t", 0, "leg", None, 0, b"", 0, result, policy_version=4))
        prompt = Prompt(id="p", input_ids=b"\0" * 4, n=1, params=0, seed=7)
        engine.emit(AttachedEnded([EndedRequest("audited", result.spans, 4, (prompt, result))]))
        described = await april.attached.description("leg")
        assert (described["spans"][0]["kv"], described["staleness"]) == ("kept", 1)
        assert not april.attached._ended

    asyncio.run(scenario())


def test_unread_descriptions_are_bounded_and_an_answer_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attached, "LIMIT_S", 0.01)
    monkeypatch.setattr(attached, "UNTAKEN", 2)

    async def scenario() -> None:
        requests = AttachedRequests()
        for rid in "abc":
            requests.receive(ended(rid))
        assert await requests.description("a") == {}
        assert await requests.description("never") == {}
        assert await requests.description("c")

    asyncio.run(scenario())
    (warning,) = caplog.messages
    assert warning.startswith("request a is answered without spans")


def chunks_of(chunks: list[str], described: dict[int, Any], after: int, n: int = 1) -> list[str]:
    """What a client of a stream gets whose choices have all ended behind `after` chunks."""
    obj: Any = SimpleNamespace(is_single=n == 1, batch_size=1, parallel_sample_num=n, april_described={})

    async def stock(_serving: Any, _obj: Any) -> AsyncIterator[str]:
        for i, chunk in enumerate(chunks):
            if i == after:
                obj.april_described.update(described)
            yield chunk

    async def read() -> list[str]:
        return [chunk async for chunk in hooks_attached.describe_stream(stock, None, obj)]

    return asyncio.run(read())


def test_the_last_chunk_of_a_stream_is_described() -> None:
    last, error = 'data: {"choices": [{"text": "é"}]}\n\n', 'data: {"error": "e"}\n\n'
    described = 'data: {"choices": [{"text": "é"}], "metadata": {"april": [{"run": "r"}]}}\n\n'
    info, done = {0: {"run": "r"}}, hooks_attached.DONE
    assert chunks_of(["a", "b", last, done], info, 1) == ["a", "b", described, done]
    assert chunks_of([last, done], info, 0) == [described, done]
    assert chunks_of(["a", error, done], info, 1) == ["a", error, done]
    assert chunks_of(["a", last], info, 1) == ["a", last], "a stream that breaks off"
    assert chunks_of(["a", last, done], {}, 0) == ["a", last, done]
    assert chunks_of(["a", last, done], info, 0, n=2) == ["a", last, done], "a choice has not ended"
