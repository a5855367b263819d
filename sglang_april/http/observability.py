"""`GET /metrics`, `GET /april/ui` and faults in `GET /health`.

None of them needs a key; the page prompts for one to read `GET /april/state`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Route

from sglang_april.http.service import AprilService

UI = "/april/ui"
HEALTH = ("/health", "/health_generate")
PATIENCE_S = 2.0
"""Longest wait for the scheduler's answer, in seconds; a long prefill may delay the answer."""
FRESH_S = 1.0
"""Minimum seconds between two requests to the scheduler, however many scrapes arrive."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
}

Asgi = Callable[..., Awaitable[None]]


def add_open_routes(app: FastAPI) -> None:
    """Add all three. `/metrics` comes before SGLang's, which is added when the server starts."""
    states: dict[AprilService, StateReader] = {}

    async def metrics(request: Request) -> Response:
        """All metrics in Prometheus's text format."""
        april = request.app.state.april
        state = await states.setdefault(april, StateReader(april)).get()
        content = await asyncio.to_thread(april.metrics.exposition, state)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    app.add_api_route("/metrics", metrics, methods=["GET"])
    for route in app.routes:
        if isinstance(route, Route) and route.path in HEALTH:
            route.app = _with_faults(route.app)
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: _before_keys(build())  # type: ignore[method-assign]


class StateReader:
    """The state of a server for scrapes: one command at a time, however many there are."""

    def __init__(self, april: AprilService) -> None:
        self._april = april
        self._asked = 0.0
        self._answer: asyncio.Task[dict[str, Any]] | None = None

    async def get(self) -> dict[str, Any] | None:
        """The state of the server; None if the scheduler does not answer in time, or refuses."""
        now = asyncio.get_running_loop().time()
        if self._answer is None or (self._answer.done() and now >= self._asked + FRESH_S):
            self._asked, self._answer = now, asyncio.ensure_future(self._april.state())
        done, _ = await asyncio.wait({self._answer}, timeout=PATIENCE_S)
        return self._answer.result() if done and self._answer.exception() is None else None


def _with_faults(stock: Asgi) -> Asgi:
    """SGLang's answer, or 503 with the reason while the journal cannot be written."""

    async def health(scope: dict[str, Any], receive: Any, send: Any) -> None:
        reason = scope["app"].state.april.restored_state.fault
        answer = JSONResponse({"error": {"field": "server", "reason": reason}}, 503) if reason else stock
        await answer(scope, receive, send)

    return health


def _before_keys(app: Asgi) -> Asgi:
    """SGLang's middleware requires a key for every route under /april, so the page is served outside of it."""
    page = files("sglang_april.http").joinpath("ui.html").read_bytes()

    async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
        is_ui = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == UI
        if is_ui and scope["method"] in ("GET", "HEAD"):
            await Response(page, media_type="text/html", headers=HEADERS)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return asgi
