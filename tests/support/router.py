"""Routers in front of engines: one that only names them, and SGLang's own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self

import httpx
import pytest

from tests.support.live import until
from tests.support.packages import unpacked
from tests.support.server import Server
from trainer_bridge.server_process import free_port

PACKAGES = ["sglang-router==0.3.2", "setproctitle==1.3.7"]


@contextmanager
def sglang_router(
    request: pytest.FixtureRequest, servers: Sequence[Server], policy: str = "manual"
) -> Iterator[httpx.Client]:
    """A client of SGLang's router, which runs in a process of its own in front of these servers."""
    packages = unpacked(PACKAGES, request.config.cache.mkdir("packages"))
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", policy, "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--worker-urls", *(server.url for server in servers)]
    env = {**os.environ, "PYTHONPATH": str(packages)}
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            until(lambda: process.poll() is not None or _workers(client) == len(servers), "the router has its workers")
            assert process.poll() is None
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _workers(client: httpx.Client) -> int:
    try:
        return sum(worker["is_healthy"] for worker in client.get("/workers").json()["workers"])
    except (httpx.HTTPError, ValueError):
        time.sleep(0.2)
        return 0


class Router:
    """`/workers` names the engines, and every POST goes to the first one. Runs in a thread as long as the context."""

    def __init__(self, urls: Sequence[str]) -> None:
        workers = json.dumps({"workers": [{"url": url} for url in urls]}).encode()

        class RouterHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, workers)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {"content-type": "application/json"}
                answer = httpx.post(urls[0] + self.path, content=body, headers=headers, timeout=120)
                self._answer(answer.status_code, answer.content)

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), RouterHandler)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def __enter__(self) -> Self:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
