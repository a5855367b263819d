"""A server whose samples end as soon as their round is open, on the real routes over real HTTP."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from sglang_april import PROTOCOL, __version__
from sglang_april.api import messages
from sglang_april.config import AprilConfig
from sglang_april.http.routes import add_routes
from sglang_april.http.service import AprilService
from tests.unit.scripted_engine import ScriptedEngine


class EagerEngine(ScriptedEngine):
    """Every sample ends as soon as its round is open, and the round with it; a round of the run `slow` stays open."""

    async def send(self, payload: bytes) -> None:
        await super().send(payload)
        command = self.commands[-1]
        if isinstance(command, messages.OpenRound) and command.spec.run != "slow":
            for requested in command.prompts:
                self.finish(command, *((requested.id, i) for i in range(requested.n)))
            self.end(command, *((requested.id, list(range(requested.n))) for requested in command.prompts))
        if isinstance(command, messages.StopRound):
            self.end(self.opened, reason="stopped")


def serve(app: FastAPI) -> tuple[uvicorn.Server, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    return server, f"http://127.0.0.1:{port}"


@contextmanager
def eager_server() -> Iterator[str]:
    """The URL of a server on an eager engine."""
    app = FastAPI()
    engine = EagerEngine()
    engine.april = app.state.april = AprilService(engine, AprilConfig(quota=1))
    engine.april.hook_report = {"hooks": ["one"], "april": __version__, "protocol": PROTOCOL}
    add_routes(app, admin=lambda endpoint: endpoint)
    server, address = serve(app)
    yield address
    server.should_exit = True
