"""The engine of a run: a server that was given, or one that is started here and ended with the run."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from sglang_april.client import AprilClient
from trainer_bridge.config import Config

POLL_S = 0.5
ANSWER_S = 600.0
"""The memory calls answer within that, or the engine hangs."""


class EngineLostError(RuntimeError):
    """The server does not answer; the message says what is known."""


class Engine:
    """Where rounds and weights go: its URL, the client, and the memory calls of the colocated cycle."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config, self._log = config, folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.url = config.server or f"http://127.0.0.1:{_free_port()}"
        self.client = AprilClient(self.url, config.api_key)
        headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S, headers=headers)

    def ready(self) -> None:
        """Wait until the server serves; start it if that is ours to do and it does not run."""
        if self._config.server is None and (self.process is None or self.process.poll() is not None):
            self._start()
        deadline = time.monotonic() + self._config.server_start_timeout
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise EngineLostError(f"the server ended with code {self.process.returncode}; its log: {self._log}")
            with contextlib.suppress(httpx.HTTPError):
                if self._http.get("/health", timeout=5).status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
        raise EngineLostError(f"{self.url} does not serve after {self._config.server_start_timeout:g} s")

    def release(self) -> None:
        """The engine gives up its weights and KV pool; partials are evacuated first (S2)."""
        self._post("/release_memory_occupation", {})

    def resume(self, *tags: str) -> None:
        """It takes back its `weights`, or its `kv_cache` and `cuda_graph`."""
        self._post("/resume_memory_occupation", {"tags": tags})

    def close(self) -> None:
        """End what was started here."""
        self.client.close()
        self._http.close()
        if self.process is not None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _post(self, route: str, body: dict[str, Any]) -> None:
        answer = self._http.post(route, json=body)
        if not answer.is_success:
            raise RuntimeError(f"POST {route}: {answer.status_code} {answer.text[:300]}")

    def _start(self) -> None:
        config = self._config
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "sglang_april.launch_server", f"--model-path={config.hf_checkpoint}"]
        command += [f"--port={port}", f"--april-quota={config.rollout_batch_size}", *config.server_flags]
        if config.api_key:
            command.append(f"--api-key={config.api_key}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
