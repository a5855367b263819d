"""Request and response bodies of the routes under /april, as JSON or MessagePack."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from sglang_april.api.errors import RequestError, bad
from sglang_april.api.requests import check_round_id

SMALL = 2**16
"""Bodies and events up to this many bytes are decoded and encoded on the event loop; larger ones in a thread."""

JSON, MSGPACK = "application/json", "application/msgpack"


async def off_loop(size: int, work: Callable[..., Any], *args: Any) -> Any:
    """Decode or encode `size` bytes: here up to `SMALL` bytes, else in a thread."""
    return work(*args) if size <= SMALL else await asyncio.to_thread(work, *args)


async def read_body(request: Request) -> bytes:
    """Read the whole body, which may arrive in chunks without a declared size.

    Raises:
        RequestError: 413, as soon as the body exceeds the limit.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        request.app.state.april.check_size(size)
    return b"".join(chunks)


def is_packed(request: Request) -> bool:
    """Whether the request body is MessagePack."""
    return "msgpack" in request.headers.get("content-type", "")


def wants_packed(request: Request) -> bool:
    """Whether the client accepts MessagePack."""
    return "msgpack" in request.headers.get("accept", "")


def round_id_of(request: Request) -> str:
    """The round id in the path. Raises: RequestError: 400."""
    return check_round_id(request.path_params["round_id"])


def query_of(request: Request, *known: str) -> dict[str, str]:
    """The query parameters. Raises: RequestError: 400: one is not in `known`."""
    for name in request.query_params:
        if name not in known:
            raise bad(name, "is not a known field")
    return dict(request.query_params)


def flag_of(query: dict[str, str], name: str) -> bool:
    """A query parameter that is `true` or `false`; false if it is absent. Raises: RequestError: 400."""
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise bad(name, "must be true or false")
    return value == "true"


def respond(request: Request, content: dict[str, Any], status: int = 200) -> Response:
    """A response in the format that the client accepts."""
    packed = wants_packed(request)
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    return Response(encode(content), status, media_type=MSGPACK if packed else JSON)


def refuse(request: Request, refused: RequestError) -> Response:
    """The response to a refused request: field and reason."""
    return respond(request, refused.body(), refused.status)
