"""The routes under /april, attached to SGLang's own app, so that its keys and logs cover them too."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from sglang_april.api import requests
from sglang_april.api.errors import RequestError, bad, fault
from sglang_april.api.requests import check_round_id
from sglang_april.http.completed_groups import wait_for_texts
from sglang_april.http.observability import add_open_routes
from sglang_april.http.reply import encode_event, size_of
from sglang_april.http.rounds import RoundRecord
from sglang_april.http.service import JOURNAL_PATIENCE_S, AprilService
from sglang_april.http.validation import check_end, check_judge, check_prompts, check_rollout, fingerprint

logger = logging.getLogger("sglang_april")

SMALL = 2**16
"""Bodies and events up to this many bytes are decoded and encoded on the event loop; larger ones in a thread."""

JSON, MSGPACK = "application/json", "application/msgpack"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[AprilService, Request], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


def add_routes(app: FastAPI, admin: Callable[[Endpoint], Endpoint]) -> None:
    """Add all routes; `admin` marks those that take the admin key. The service is found in `app.state.april`.

    They go to the app itself: in an included router SGLang's middleware would not find the marks.
    """
    for method, path, handler in (
        ("POST", "/april/rollout", rollout),
        ("GET", "/april/rounds/{round_id}", get_round),
        ("POST", "/april/rounds/{round_id}/stop", stop),
        ("POST", "/april/rounds/{round_id}/ack", acknowledge),
        ("POST", "/april/rounds/{round_id}/judge", judge),
        ("POST", "/april/rounds/{round_id}/extend", extend),
        ("POST", "/april/rounds/{round_id}/done", end_trajectories),
        ("POST", "/april/trajectories/done", end_trajectories_of_run),
        ("GET", "/april/trajectories/{trajectory:path}", get_trajectory),
        ("GET", "/april/state", state),
        ("GET", "/april/partials", partials),
    ):
        app.add_api_route(path, _endpoint(handler), methods=[method])
    for method, path, handler in (
        ("POST", "/april/push/begin", push_begin),
        ("POST", "/april/push/end", push_end),
        ("POST", "/april/drop", drop),
        ("GET", "/april/check", check),
        ("POST", "/april/audit/ack", acknowledge_audit),
    ):
        app.add_api_route(path, admin(_endpoint(handler)), methods=[method])
    add_open_routes(app)
    app.add_api_route("/april/{path:path}", _endpoint(no_route), methods=METHODS, include_in_schema=False)


def _endpoint(handler: Handler) -> Endpoint:
    """Wrap a handler for FastAPI: every error becomes a reply with a field and a reason."""

    async def endpoint(request: Request) -> Response:
        april = request.app.state.april
        try:
            declared = request.headers.get("content-length", "")
            april.check_size(int(declared) if declared.isdecimal() else 0)
            await april.restored_state.ready()
            return await handler(april, request)
        except RequestError as refused:
            return _refusal(request, refused)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            return _refusal(request, fault(error))

    endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
    return endpoint


async def rollout(april: AprilService, request: Request) -> Response:
    """Open a round, or find it by its `round_id`, and answer with its reply."""
    data, packed = await _body(request), _is_packed(request)
    body, digest = await _off_loop(len(data), _read_rollout, data, packed)
    round_ = await april.open(body, digest)
    if body.stream:
        return StreamingResponse(
            _events(april, round_, body.previews or round_.spec.judged), media_type="application/x-ndjson"
        )
    return await _reply(april, request, round_)


def _read_rollout(data: bytes, packed: bool) -> tuple[requests.RolloutBody, str]:
    body = requests.decode_rollout(data, packed)
    return body, check_rollout(body, packed)


async def get_round(april: AprilService, request: Request) -> Response:
    """The reply of a round, or 202 while it is open."""
    round_ = april.rounds.find(_round_id(request))
    if not round_.reply.done():
        return _answer(request, {"round_id": round_.id, "run": round_.run, "state": round_.state}, 202)
    return await _reply(april, request, round_)


async def stop(april: AprilService, request: Request) -> Response:
    """End a round now."""
    body = requests.decode_stop(await _body(request), _is_packed(request))
    return _answer(request, await april.stop(_round_id(request), body.deliver))


async def acknowledge(april: AprilService, request: Request) -> Response:
    """Acknowledge the reply of a round, which need not be kept any longer."""
    requests.decode_nothing(await _body(request), _is_packed(request))
    return _answer(request, await april.acknowledge(_round_id(request)))


async def judge(april: AprilService, request: Request) -> Response:
    """Accept and reject finished groups of a round with `count: accepted`."""
    body = requests.decode_judge(await _body(request), _is_packed(request))
    check_judge(body)
    return _answer(request, await april.judge(_round_id(request), body.accept, body.reject))


async def extend(april: AprilService, request: Request) -> Response:
    """A larger quota and more prompts for an open round."""
    data, packed = await _body(request), _is_packed(request)
    body, digest = await _off_loop(len(data), _read_extend, data, packed)
    return _answer(request, await april.extend(_round_id(request), body, digest))


def _read_extend(data: bytes, packed: bool) -> tuple[requests.ExtendBody, str]:
    body = requests.decode_extend(data, packed)
    check_prompts(body.prompts, packed)
    return body, fingerprint(body)


async def end_trajectories(april: AprilService, request: Request) -> Response:
    """Trajectories of a round's run are done, or rejected."""
    body = requests.decode_end(await _body(request), _is_packed(request))
    check_end(body)
    run = april.rounds.find(_round_id(request)).run
    return _answer(request, await april.end_trajectories(run, body))


async def end_trajectories_of_run(april: AprilService, request: Request) -> Response:
    """The same for a run that is named."""
    body = requests.decode_end_of_run(await _body(request), _is_packed(request))
    check_end(body)
    return _answer(request, await april.end_trajectories(body.run, body))


async def get_trajectory(april: AprilService, request: Request) -> Response:
    """The record of an undelivered trajectory."""
    run = _query(request, "run").get("run", "")
    if not 1 <= len(run) <= 256:
        raise bad("run", "is required, and has 1 to 256 characters")
    record = await april.trajectory(run, request.path_params["trajectory"], _wants_packed(request))
    return _answer(request, record)


async def push_begin(april: AprilService, request: Request) -> Response:
    """A weight push begins."""
    body = requests.decode_push(await _body(request), _is_packed(request))
    return _answer(request, await april.pushes.begin(body.version))


async def push_end(april: AprilService, request: Request) -> Response:
    """A weight push is complete."""
    body = requests.decode_push(await _body(request), _is_packed(request))
    return _answer(request, await april.pushes.end(body.version))


async def drop(april: AprilService, request: Request) -> Response:
    """Delete undelivered groups of a run."""
    body = requests.decode_drop(await _body(request), _is_packed(request))
    return _answer(request, await april.drop(body.run, body.ids))


async def acknowledge_audit(april: AprilService, request: Request) -> Response:
    """The findings of the audit are known: rounds may open again."""
    requests.decode_nothing(await _body(request), _is_packed(request))
    return _answer(request, april.audit.acknowledge())


async def state(april: AprilService, request: Request) -> Response:
    """The state of the server."""
    _query(request)
    return _answer(request, await april.state())


async def check(april: AprilService, request: Request) -> Response:
    """Whether every stored page verifies."""
    _query(request)
    return _answer(request, await april.check())


async def partials(april: AprilService, request: Request) -> Response:
    """The suspended samples of a run, or of all."""
    run = _query(request, "run").get("run")
    if run is not None and not 1 <= len(run) <= 256:
        raise bad("run", "must have 1 to 256 characters")
    return _answer(request, await april.partials(run))


async def no_route(_april: AprilService, request: Request) -> Response:
    """Everything else under /april."""
    raise RequestError(404, "path", f"there is no {request.method} {request.url.path}")


async def _reply(april: AprilService, request: Request, round_: RoundRecord) -> Response:
    """Wait for the reply until the client disconnects, which does not end the round."""
    gone = asyncio.ensure_future(_disconnected(request))
    waiting = asyncio.ensure_future(april.wait(round_, round_.reply))
    try:
        await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            return Response(status_code=499)
        reply = waiting.result()
    finally:
        gone.cancel()
        waiting.cancel()
    packed = _wants_packed(request)
    encoded = await _off_loop(reply.nbytes, reply.encode, packed)
    return Response(encoded, media_type=MSGPACK if packed else JSON)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(april: AprilService, round_: RoundRecord, previews: bool) -> AsyncIterator[bytes]:
    """Newline-delimited JSON: previews as groups finish, then what the round delivers beyond them, then the summary.

    A replay is identical, except for `waiting` and, after a restart, the previews of a round that had ended.
    """
    shown = 0
    while True:
        changed = round_.changed
        while previews and shown < len(round_.events):
            part = round_.events[shown]
            shown += 1
            await wait_for_texts([part])
            yield await _off_loop(size_of(part), encode_event, part, False)
        if round_.reply.done():
            break
        try:
            await asyncio.wait_for(changed.wait(), JOURNAL_PATIENCE_S)
        except TimeoutError:
            if reason := april.restored_state.fault:
                yield msgspec.json.encode({"event": "waiting", "reason": reason}) + b"\n"
    try:
        reply = round_.reply.result()
    except RequestError as refused:
        yield msgspec.json.encode({"event": "error", **refused.body()}) + b"\n"
        return
    previewed = {key for part in round_.events[:shown] for key in part.keys}
    for part in reply.parts:
        if (rest := part.without(previewed)).done:
            yield await _off_loop(size_of(rest), encode_event, rest, True)
    yield msgspec.json.encode(reply.summary()) + b"\n"


async def _off_loop(size: int, work: Callable[..., Any], *args: Any) -> Any:
    return work(*args) if size <= SMALL else await asyncio.to_thread(work, *args)


async def _body(request: Request) -> bytes:
    """The whole body, which may come in chunks without a declared size.

    Raises:
        RequestError: 413, as soon as it is too large.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        request.app.state.april.check_size(size)
    return b"".join(chunks)


def _is_packed(request: Request) -> bool:
    return "msgpack" in request.headers.get("content-type", "")


def _wants_packed(request: Request) -> bool:
    return "msgpack" in request.headers.get("accept", "")


def _round_id(request: Request) -> str:
    return check_round_id(request.path_params["round_id"])


def _query(request: Request, *known: str) -> dict[str, str]:
    for name in request.query_params:
        if name not in known:
            raise bad(name, "is not a known field")
    return dict(request.query_params)


def _answer(request: Request, content: dict[str, Any], status: int = 200) -> Response:
    packed = _wants_packed(request)
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    return Response(encode(content), status, media_type=MSGPACK if packed else JSON)


def _refusal(request: Request, refused: RequestError) -> Response:
    return _answer(request, refused.body(), refused.status)
