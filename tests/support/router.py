"""A router as trainers see it: `/workers` names the engines, and every other POST goes to the first one."""

import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Self

import httpx


class Router:
    """Runs in a thread as long as the context."""

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
