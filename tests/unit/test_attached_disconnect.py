"""What an attached request leaves behind when its client goes or SGLang refuses it."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.tokenizer_manager import ServerStatus

from sglang_april.adapter.core import hooks_attached
from sglang_april.http import attached
from sglang_april.http.attached import AttachedRequests
from tests.unit.test_attach_request import request
from tests.unit.test_attached_answers import ended


class Sent(NamedTuple):
    """A request on its way to the scheduler."""

    rid: str


def aborted_after(act: Callable[[Callable[[str], Any]], AsyncIterator[Any]], answers: int) -> list[str]:
    """The rids that are aborted when the client of an attached request goes after some answers.

    `act`: SGLang's part, which gets a function that sends a request to the scheduler and returns its state.
    """
    aborted: list[str] = []
    manager: Any = SimpleNamespace(
        april=SimpleNamespace(config=SimpleNamespace(attach="r"), attached=AttachedRequests()),
        rid_to_state=defaultdict(lambda: SimpleNamespace(finished=False)),
        server_args=SimpleNamespace(disable_overlap_schedule=True),
        preferred_sampling_params=None,
        server_status=ServerStatus.Up,
        auto_create_handle_loop=lambda: None,
        _dispatch_to_scheduler=lambda message: aborted.append(message.rid),
    )

    def send(rid: str) -> Any:
        hooks_attached.note_sent(manager, Sent(rid))
        return manager.rid_to_state[rid]

    async def run() -> None:
        stream = hooks_attached.generate(lambda *_: act(send), manager, request())
        with contextlib.suppress(StopAsyncIteration, ValueError):
            for _ in range(answers):
                await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    return aborted


def answer(rid: str, reason: dict[str, Any] | None) -> dict[str, Any]:
    described = {hooks_attached.DESCRIPTION: msgspec.json.encode(ended(rid)).decode()}
    return {"meta_info": {"id": rid, "finish_reason": reason and {**reason, **described}}}


def test_a_disconnect_aborts_what_was_sent_and_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang compares the beginnings of rids: any other rid would abort requests of other clients."""
    monkeypatch.setattr(hooks_attached, "TokenizedGenerateReqInput", Sent)

    async def stock(send: Callable[[str], Any], rids: list[str]) -> AsyncIterator[Any]:
        states = [send(rid) for rid in rids]
        for rid, state in zip(rids, states, strict=True):
            yield answer(rid, None)
            state.finished = True
            yield answer(rid, {"type": "stop"})

    async def refuses(send: Callable[[str], Any], rids: list[str]) -> AsyncIterator[Any]:
        for rid in rids:
            send(rid).finished = True
        raise ValueError("the prompt has no tokens, or its grammar does not compile")
        yield

    assert aborted_after(lambda send: stock(send, ["a", "b"]), 1) == ["a", "b"]
    assert aborted_after(lambda send: stock(send, ["a", "b"]), 2) == ["b"]
    assert aborted_after(lambda send: stock(send, ["a", "b"]), 5) == []
    assert aborted_after(lambda send: stock(send, [""]), 1) == []
    for rids in ([], ["a"]):
        assert aborted_after(lambda send, rids=rids: refuses(send, rids), 1) == []  # type: ignore[misc]


def test_a_description_of_an_earlier_request_with_the_rid_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has gone without reading it."""
    monkeypatch.setattr(attached, "LIMIT_S", 0.01)
    monkeypatch.setattr(hooks_attached, "TokenizedGenerateReqInput", Sent)
    requests = AttachedRequests()
    manager: Any = SimpleNamespace(april=SimpleNamespace(attached=requests), rid_to_state={"a": None})
    requests.receive(ended("a"))
    token = hooks_attached._attached.set({})
    hooks_attached.note_sent(manager, Sent("a"))
    hooks_attached._attached.reset(token)
    assert asyncio.run(requests.description("a")) == {}
