"""What docs/security.md specifies about keys, against SGLang's own middleware on the real routes."""

import itertools
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from sglang_april.api import messages
from sglang_april.http import observability
from sglang_april.http.routes import add_routes
from tests.unit.http_app import run
from tests.unit.scripted_engine import service, sglang_module
from tests.unit.test_metrics import STATE

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
ROW = re.compile(r"^\| `(GET|POST) (/april/\S+)` \| (.+) \|$", re.MULTILINE)
LEVELS = {(method, path): level for method, path, level in ROW.findall(PAGE)}
USER, ADMIN = "user-key", "admin-key"

KEYS = ("", USER, ADMIN)
"""What a client sends; empty: nothing."""


def allowed(level: str, user_key: bool, admin_key: bool) -> set[str]:
    """The keys with which a route may be called, by the page's first table."""
    if level == "none":
        return set(KEYS)
    if level == "admin" and admin_key:
        return {ADMIN}
    if user_key:
        return {USER}
    return set(KEYS)


def app_with(user_key: bool, admin_key: bool) -> FastAPI:
    auth = sglang_module("srt/utils/auth.py")
    april, engine = service()
    engine.silent.clear()
    engine.answers[messages.GetState] = messages.Answer(0, data=STATE)
    app = FastAPI()
    app.state.april = april
    add_routes(app, admin=auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL))
    if user_key or admin_key:
        auth.add_api_key_middleware(app, api_key=USER if user_key else None, admin_api_key=ADMIN if admin_key else None)
    return app


def test_page_lists_every_route() -> None:
    routes = {
        (method, route.path)
        for route in app_with(False, False).routes
        if route.path.startswith("/april/") and route.path != "/april/{path:path}"
        for method in route.methods
    }
    assert routes | {("GET", observability.UI)} == set(LEVELS)


@pytest.mark.parametrize(("user_key", "admin_key"), itertools.product([False, True], repeat=2))
def test_each_route_takes_the_keys_that_the_page_lists(user_key: bool, admin_key: bool) -> None:
    async def scenario() -> None:
        app = app_with(user_key, admin_key)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:

            async def passes(method: str, path: str, key: str) -> bool:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                content = b"{" if method == "POST" else None  # refused by the route, if it is reached
                path = path.replace("{round_id}", "none")
                return (await client.request(method, path, headers=headers, content=content)).status_code != 401

            calls = {
                **LEVELS,
                ("GET", "/metrics"): "none",
                ("POST", "/april/ui"): "user",
                ("GET", "/april/unknown"): "user",
                ("PUT", "/april/state"): "user",
            }
            for (method, path), level in calls.items():
                got = {key for key in KEYS if await passes(method, path, key)}
                assert got == allowed(level, user_key, admin_key), (method, path)

    run(scenario())
