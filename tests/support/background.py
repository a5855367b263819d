"""Rounds that run in a thread while a test does something else, and streamed rounds."""

import json
import threading
from typing import Any

import httpx

from tests.support.server import Server

TIMEOUT_S = 120.0


class BackgroundRound:
    """`POST /april/rollout` in a thread; `reply()` waits for it."""

    def __init__(self, server: Server, **body: Any) -> None:
        self._server, self._body = server, body
        self._reply: httpx.Response | None = None
        self._thread = threading.Thread(target=self._post, daemon=True)
        self._thread.start()

    def _post(self) -> None:
        self._reply = httpx.post(f"{self._server.url}/april/rollout", json=self._body, timeout=TIMEOUT_S)

    def reply(self, status: int = 200) -> Any:
        self._thread.join(TIMEOUT_S)
        assert self._reply is not None, "no reply"
        assert self._reply.status_code == status, self._reply.text[:500]
        return self._reply.json()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    """Return all events of a streamed round, the summary last."""
    body = {**body, "stream": True}
    with httpx.stream("POST", f"{server.url}/april/rollout", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == 200, response.read()[:500]
        return [json.loads(line) for line in response.iter_lines()]
