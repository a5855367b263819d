"""Requests of SGLang's own routes that belong to a run: in the HTTP process (`attached-request`)."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils.aio_rwlock import RWLock

from sglang_april.adapter.core.attach_request import DESCRIPTION, Attachment, attach, is_attached
from sglang_april.adapter.shapes.installed import shape
from sglang_april.http.attached import read_description

_pausing: ContextVar[bool] = ContextVar("pausing", default=False)
_attached: ContextVar[dict[str, Any] | None] = ContextVar("attached", default=None)
"""In an attached request: what SGLang has sent to the scheduler for it, as its `ReqState` by rid."""
DATA, DONE = "data: ", "data: [DONE]\n\n"
"""Prefix of every chunk of an OpenAI stream, and its last chunk."""


class PassableLock(RWLock):
    """SGLang's `model_update_lock`, which attached requests pass but do not hold: no weight call waits for them,
    because the scheduler suspends them."""

    def __init__(self) -> None:
        super().__init__()
        self.stock = 0
        """SGLang's own requests that hold it: those in generation, health checks included. SGLang's table of requests
        does not show them: releases other than 0.5.17 and 0.5.23 leave entries in it for ever."""

    @property
    def reader_lock(self) -> Any:
        return self._pass() if _attached.get() is not None else self._hold()

    @asynccontextmanager
    async def _pass(self) -> AsyncIterator[None]:
        await self.acquire_reader()
        await self.release_reader()
        yield

    @asynccontextmanager
    async def _hold(self) -> AsyncIterator[None]:
        await self.acquire_reader()
        self.stock += 1
        try:
            yield
        finally:
            self.stock -= 1
            await self.release_reader()


def generate(original: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    """AROUND `generate_request`, an asynchronous generator.

    Raises:
        ValueError: the request cannot be attached. SGLang's routes answer 400.
    """
    headers = getattr(request, "headers", None) or {}
    warms_up = request is not None and manager.server_status is ServerStatus.Starting
    default = None if warms_up else manager.april.config.attach
    overlap = not shape.resolved(manager.server_args).disable_overlap_schedule
    try:
        attachment = attach(obj, headers, default, overlap=overlap, preferred=manager.preferred_sampling_params)
        if attachment is not None and attachment.trajectory is not None and manager.april.attached.is_awaited(obj.rid):
            # SGLang has forgotten the first one, whose answer the journal delays: the two would exchange their spans.
            raise ValueError(f"Duplicate request ID detected: {obj.rid}")
    except ValueError:
        obj.is_single, obj.rid = False, []  # what SGLang aborts two seconds after the end of a stream
        raise
    answers = original(manager, obj, request)
    if attachment is None:
        return answers
    obj.april_described = {}
    return _answers(answers, manager, attachment, obj.april_described)


async def _answers(answers: Any, manager: Any, attachment: Attachment, described: dict[int, Any]) -> AsyncIterator[Any]:
    """SGLang's answers. The last one of each choice contains its description, which is also added to `described`."""
    manager.auto_create_handle_loop()  # a task created below would inherit `_attached` permanently
    sent: dict[str, Any] = {}
    try:
        token = _attached.set(sent)  # set only until the first answer, before which SGLang takes the lock and sends
        try:
            answer = await anext(answers, None)
        finally:
            _attached.reset(token)
        while answer is not None:
            if isinstance(answer, list) or answer["meta_info"].get("finish_reason"):  # no more for a chunk of a stream
                await _describe(answer, manager, attachment, described)
            yield answer
            answer = await anext(answers, None)
    finally:
        _abort(manager, sent)
        await answers.aclose()


async def _describe(answer: Any, manager: Any, attachment: Attachment, described: dict[int, Any]) -> None:
    for choice, one in enumerate(answer if isinstance(answer, list) else (answer,)):
        if reason := one["meta_info"].get("finish_reason"):
            told, rid = reason.pop(DESCRIPTION, None), one["meta_info"]["id"]
            leg = attachment.trajectory is not None
            info = read_description(told) if told else await manager.april.attached.description(rid, leg=leg)
            one["meta_info"]["april"] = described[one.get("index", choice)] = {**attachment._asdict(), **info}


def note_sent(manager: Any, message: Any) -> None:
    """BEFORE `_dispatch_to_scheduler`."""
    sent = _attached.get()
    if sent is None:
        return
    for one in getattr(message, "batch", [message]):
        if isinstance(one, TokenizedGenerateReqInput):
            manager.april.attached.forget(one.rid)
            sent[one.rid] = manager.rid_to_state[one.rid]


def _abort(manager: Any, sent: dict[str, Any]) -> None:
    """Abort the requests of a client that disconnected. 0.5.17 aborts them itself; 0.5.18 lets them run.

    SGLang compares the beginnings of rids: an ended request's, or an empty one, would abort those of other clients.
    """
    for rid, state in sent.items():
        if rid and not state.finished:
            manager._dispatch_to_scheduler(AbortReq(rid=rid, abort_all=False))


def abort(original: Callable[..., None], manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """AROUND `abort_request`: a pause of mode `abort` does not abort attached requests."""
    if not (abort_all and _pausing.get()):
        original(manager, rid, abort_all)
        return
    for other, state in list(manager.rid_to_state.items()):
        # 0.5.23 sends one abort for each request, and none later if the scheduler does not have it yet.
        if not is_attached(state.obj) and getattr(state, "dispatched", True):
            original(manager, other)


async def pause(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    """SGLang's `pause_generation`, in which `abort` does not abort attached requests."""
    token = _pausing.set(True)
    try:
        return await original(manager, obj)
    finally:
        _pausing.reset(token)


def describe_response(result: Any, _serving: Any, _request: Any, ret: list[dict[str, Any]], _created: int) -> Any:
    """AFTER `_build_chat_response` and `_build_completion_response`: spans in the response's `metadata`."""
    found = [one["meta_info"]["april"] for one in ret if "april" in one["meta_info"]]
    if found and getattr(result, "metadata", None) is not None:
        result.metadata["april"] = found
    return result


async def describe_stream(
    original: Callable[..., Any], serving: Any, adapted_request: Any, *args: Any
) -> AsyncIterator[str]:
    """AROUND `_generate_chat_stream` and `_generate_completion_stream`: the last chunk has spans in `metadata`.

    A chunk waits for the next one only when every choice has ended.
    """
    chunks, held = original(serving, adapted_request, *args), ""
    try:
        async for chunk in chunks:
            if chunk == DONE:
                held = _described(held, adapted_request)
            if held:
                yield held
                held = ""
            if chunk != DONE and _all_ended(adapted_request):
                held = chunk
            else:
                yield chunk
        if held:
            yield held
    finally:
        await chunks.aclose()


def _all_ended(obj: Any) -> bool:
    described = getattr(obj, "april_described", None) or {}
    return bool(described) and len(described) == (1 if obj.is_single else obj.batch_size * obj.parallel_sample_num)


def _described(chunk: str, obj: Any) -> str:
    content = json.loads(chunk.removeprefix(DATA)) if chunk else {}
    if "choices" not in content:  # an error
        return chunk
    content["metadata"] = {"april": [info for _, info in sorted(obj.april_described.items())]}
    return f"{DATA}{json.dumps(content, ensure_ascii=False)}\n\n"
