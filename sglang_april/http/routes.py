"""The routes under /april, attached to SGLang's own app, so that its keys and logs cover them too."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from sglang_april.api import requests
from sglang_april.api.errors import RequestError, bad, fault
from sglang_april.http.bodies import (
    JSON,
    MSGPACK,
    flag_of,
    is_packed,
    off_loop,
    query_of,
    read_body,
    refuse,
    respond,
    round_id_of,
    wants_packed,
)
from sglang_april.http.completed_groups import wait_for_texts
from sglang_april.http.observability import add_open_routes
from sglang_april.http.reply import encode_event, size_of
from sglang_april.http.rounds import RoundRecord
from sglang_april.http.service import JOURNAL_PATIENCE_S, AprilService
from sglang_april.http.validation import check_end, check_judge, check_prompts, check_rollout, fingerprint

logger = logging.getLogger("sglang_april")

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

Handler = Callable[[AprilService, Request], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


def add_routes(app: FastAPI, admin: Callable[[Endpoint], Endpoint]) -> None:
    """Add all routes; `admin` marks those that take the admin key. The service is found in `app.state.april`.

    The routes are added to the app directly: in an included router SGLang's middleware would not find the marks.
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
            return refuse(request, refused)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.url.path)
            return refuse(request, fault(error))

    endpoint.__name__, endpoint.__doc__ = handler.__name__, handler.__doc__
    return endpoint


async def rollout(april: AprilService, request: Request) -> Response:
    """Open a round, or find it by its `round_id`, and answer with its reply."""
    data, packed = await read_body(request), is_packed(request)
    body, digest = await off_loop(len(data), _read_rollout, data, packed)
    round_ = await april.open(body, digest)
    if body.stream:
        return _stream(april, round_, body.previews)
    return await _reply(april, request, round_)


def _read_rollout(data: bytes, packed: bool) -> tuple[requests.RolloutBody, str]:
    body = requests.decode_rollout(data, packed)
    return body, check_rollout(body, packed)


async def get_round(april: AprilService, request: Request) -> Response:
    """The reply of a round, or 202 while it is open; with `stream=true` its events from the first one on."""
    query = query_of(request, "stream", "previews")
    stream, previews = flag_of(query, "stream"), flag_of(query, "previews")
    round_ = april.rounds.find(round_id_of(request))
    if stream:
        if round_.spec.trajectories:
            raise bad("stream", "is not supported in a round of trajectories")
        await april.wait(round_, round_.opened)
        return _stream(april, round_, previews)
    if not round_.reply.done():
        return respond(request, {"round_id": round_.id, "run": round_.run, "state": round_.state}, 202)
    return await _reply(april, request, round_)


async def stop(april: AprilService, request: Request) -> Response:
    """End a round now."""
    body = requests.decode_stop(await read_body(request), is_packed(request))
    return respond(request, await april.round_commands.stop(round_id_of(request), body.deliver))


async def acknowledge(april: AprilService, request: Request) -> Response:
    """Acknowledge the reply of a round, which need not be kept any longer."""
    requests.decode_nothing(await read_body(request), is_packed(request))
    return respond(request, await april.round_commands.acknowledge(round_id_of(request)))


async def judge(april: AprilService, request: Request) -> Response:
    """Accept and reject finished groups of a round with `count: accepted`."""
    body = requests.decode_judge(await read_body(request), is_packed(request))
    check_judge(body)
    return respond(request, await april.round_commands.judge(round_id_of(request), body.accept, body.reject))


async def extend(april: AprilService, request: Request) -> Response:
    """A larger quota and more prompts for an open round."""
    data, packed = await read_body(request), is_packed(request)
    body, digest = await off_loop(len(data), _read_extend, data, packed)
    return respond(request, await april.round_commands.extend(round_id_of(request), body, digest))


def _read_extend(data: bytes, packed: bool) -> tuple[requests.ExtendBody, str]:
    body = requests.decode_extend(data, packed)
    check_prompts(body.prompts, packed)
    return body, fingerprint(body)


async def end_trajectories(april: AprilService, request: Request) -> Response:
    """Trajectories of a round's run are done, or rejected."""
    body = requests.decode_end(await read_body(request), is_packed(request))
    check_end(body)
    run = april.rounds.find(round_id_of(request)).run
    return respond(request, await april.end_trajectories(run, body))


async def end_trajectories_of_run(april: AprilService, request: Request) -> Response:
    """Trajectories of the run in the body are done, or rejected."""
    body = requests.decode_end_of_run(await read_body(request), is_packed(request))
    check_end(body)
    return respond(request, await april.end_trajectories(body.run, body))


async def get_trajectory(april: AprilService, request: Request) -> Response:
    """The record of an undelivered trajectory."""
    run = query_of(request, "run").get("run", "")
    if not 1 <= len(run) <= 256:
        raise bad("run", "is required, with 1 to 256 characters")
    record = await april.trajectory(run, request.path_params["trajectory"], wants_packed(request))
    return respond(request, record)


async def push_begin(april: AprilService, request: Request) -> Response:
    """A weight push begins."""
    body = requests.decode_push(await read_body(request), is_packed(request))
    return respond(request, await april.pushes.begin(body.version))


async def push_end(april: AprilService, request: Request) -> Response:
    """A weight push is complete."""
    body = requests.decode_push(await read_body(request), is_packed(request))
    return respond(request, await april.pushes.end(body.version))


async def drop(april: AprilService, request: Request) -> Response:
    """Delete undelivered groups of a run."""
    body = requests.decode_drop(await read_body(request), is_packed(request))
    return respond(request, await april.drop(body.run, body.ids))


async def acknowledge_audit(april: AprilService, request: Request) -> Response:
    """Acknowledge the findings of the audit, so that rounds may open again."""
    requests.decode_nothing(await read_body(request), is_packed(request))
    return respond(request, april.audit.acknowledge())


async def state(april: AprilService, request: Request) -> Response:
    """The state of the server."""
    query_of(request)
    return respond(request, await april.state())


async def check(april: AprilService, request: Request) -> Response:
    """Whether every stored page verifies."""
    query_of(request)
    return respond(request, await april.check())


async def partials(april: AprilService, request: Request) -> Response:
    """The suspended samples of a run, or of all."""
    run = query_of(request, "run").get("run")
    if run is not None and not 1 <= len(run) <= 256:
        raise bad("run", "must have 1 to 256 characters")
    return respond(request, await april.partials(run))


async def no_route(_april: AprilService, request: Request) -> Response:
    """Answer 404 to every other path under /april."""
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
    packed = wants_packed(request)
    encoded = await off_loop(reply.nbytes, reply.encode, packed)
    return Response(encoded, media_type=MSGPACK if packed else JSON)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _stream(april: AprilService, round_: RoundRecord, previews: bool) -> StreamingResponse:
    events = _events(april, round_, previews or round_.spec.judged)
    return StreamingResponse(events, media_type="application/x-ndjson")


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
            yield await off_loop(size_of(part), encode_event, part, False)
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
        yield msgspec.json.encode({"event": "error", "status": refused.status, **refused.body()}) + b"\n"
        return
    previewed = {key for part in round_.events[:shown] for key in part.keys}
    for part in reply.parts:
        if (rest := part.without(previewed)).done:
            yield await off_loop(size_of(rest), encode_event, rest, True)
    yield msgspec.json.encode(reply.summary()) + b"\n"
