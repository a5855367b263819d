"""The routes on the real app and service, for tests with a scripted scheduler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from sglang_april.api import messages
from sglang_april.http.routes import add_routes
from sglang_april.http.service import AprilService
from tests.unit.scripted_engine import ScriptedEngine


@asynccontextmanager
async def client_of(april: AprilService) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.state.april = april
    add_routes(app, admin=lambda endpoint: endpoint)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        yield client


async def until(condition: Any) -> None:
    """Let the event loop run until something is true."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def open_round(client: httpx.AsyncClient, engine: ScriptedEngine, **body: Any) -> asyncio.Task[httpx.Response]:
    """Send a rollout and wait until the scheduler has it."""
    before = sum(isinstance(command, messages.OpenRound) for command in engine.commands)
    headers = body.pop("headers", {})
    task = asyncio.create_task(client.post("/april/rollout", json=body, headers=headers))
    await until(lambda: sum(isinstance(c, messages.OpenRound) for c in engine.commands) > before or task.done())
    return task


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 20))
