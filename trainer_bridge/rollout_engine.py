"""The engines of a run: external servers, or servers that the run starts and stops."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from sglang_april.client import AprilClient
from sglang_april.client.engine_pool import EnginePool
from trainer_bridge.config import Config
from trainer_bridge.megatron.device import uses_gpus
from trainer_bridge.push.push_target import call_all
from trainer_bridge.server_process import (
    EngineGoneError,
    EngineLostError,
    LocalServerProcess,
    ServerProcess,
    ServerStartError,
    last_error,
)
from trainer_bridge.validate import RunError

if TYPE_CHECKING:
    from trainer_bridge.ray_cluster import RayCluster

MEMORY_SAVER = "--enable-memory-saver"
"""Without it, SGLang answers a release of memory and keeps the memory."""
POLL_S = 0.5
NOTE_S = 10.0
"""Interval of progress lines while a server starts."""
HEALTH_TIMEOUT_S = 5.0
START_TIMEOUT_S = 5.0
"""Seconds that the end of a server waits for its start."""
MEMORY_CALL_TIMEOUT_S = 600.0
RETRY_S = 1.0
"""A server may close an idle connection just as a call is sent. `EngineSession` handles the loss of a server."""
NOT_RELEASED = "tags: {} cannot be resumed, because it is not released"
"""A server's reason for refusing to resume tags, none of which is released."""


class RolloutEngine:
    """One server: its URL, its client, and the memory calls of colocated runs.

    A server of the run keeps a journal in the run's folder, so that its death loses no sample. It outlives a trainer
    that is killed: the next trainer finds it by its record, with everything that it carries.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        number: int = 0,
        url: str | None = None,
        cluster: "RayCluster | None" = None,
        note: Callable[[str], None] = print,
    ) -> None:
        """`url`: URL of an external server; `number`: index of a server that is started, among several.

        `note` prints a line of progress.
        """
        name = f"server-{number}" if number else "server"
        self._config, self._number, self._log = config, number, folder / f"{name}.log"
        self._journal, self._note = folder / f"{name}.journal", note
        self._was_ready, self._ended = False, threading.Event()
        self._starting_or_ending = threading.Lock()
        self.process: ServerProcess | None = None
        """None for an external server."""
        if url is None:
            self.process = _server_process(folder / f"{name}.json", config, cluster)
            url = self.process.url or self.process.new_url()
        self.url = url
        self.client = AprilClient(self.url, config.api_key, retry_s=RETRY_S)
        headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = httpx.Client(base_url=self.url, timeout=MEMORY_CALL_TIMEOUT_S, headers=headers)

    def wait_until_ready(self) -> None:
        """Wait until the server is healthy, after starting it if it is a server of the run and not running.

        Raises:
            EngineLostError: a server of the run that was ready before has exited.
            EngineGoneError: no server is healthy in time.
            ServerStartError: it exits in its first start.
        """
        process, timeout = self.process, self._config.server_start_timeout
        logged = self._log.stat().st_size if self._log.exists() else 0
        with self._starting_or_ending:
            if process is not None and not process.alive and not self._ended.is_set():
                self._note(f"starting a server at {self.url}; log: {self._log}")
                process.start(self._command(), self.url, self._log)
        began = noted = time.monotonic()
        while (now := time.monotonic()) < began + timeout and not self._ended.is_set():
            if process is not None and not process.alive:
                reason = last_error(self._log, logged)
                if self._was_ready:
                    raise EngineLostError(f"the server has exited: {reason} (log: {self._log})")
                raise ServerStartError(f"the server did not start: {reason} (log: {self._log})")
            with contextlib.suppress(httpx.HTTPError):
                self._wake()
                if self._http.get("/health", timeout=HEALTH_TIMEOUT_S).status_code == httpx.codes.OK:
                    self._was_ready = True
                    return
            if now > noted + NOTE_S:
                noted = now
                news = last_error(self._log, logged)[:100] or "it imports SGLang"
                self._note(f"waiting for {self.url} ({now - began:.0f} s): {news}")
            self._ended.wait(POLL_S)
        raise EngineGoneError(f"no server at {self.url} became ready within {timeout:g} s (server_start_timeout)")

    def _wake(self) -> None:
        """End the release of memory and the pause that a trainer which was killed in between has left; no-op otherwise.

        `/health` generates a token, which would wait for the end of a pause, and end a server without its memory.
        """
        if self._config.colocate:
            self.resume("weights")
            self.resume("kv_cache", "cuda_graph")
        self._http.post("/continue_generation", json={}, timeout=HEALTH_TIMEOUT_S)

    def release(self) -> None:
        """Release weights and KV pool; the server evacuates partials first (`evacuate-before-clear`).

        The next round may be open already: a trainer that resumes repeats the steps since its last checkpoint, and a
        restarted server has reopened its round. Memory can be released beside an open round only under a pause, and
        without one only if not: a stock request that is about to end would not end under it.
        """
        if not self.client.state()["rounds"]:
            self._post("/release_memory_occupation", {})
            return
        self._post("/pause_generation", {"mode": "retract"})
        try:
            self._post("/release_memory_occupation", {})
        finally:
            self._post("/continue_generation", {})

    def resume(self, *tags: str) -> None:
        """Allocate `weights`, or `kv_cache` and `cuda_graph`, again.

        A server that has been restarted since the release has them all; its refusal for that reason is ignored.
        """
        ignored_refusal = NOT_RELEASED.format(", ".join(sorted(tags)))
        self._post("/resume_memory_occupation", {"tags": tags}, ignored_refusal)

    def close(self) -> None:
        """Close the connections, and stop a server of the run."""
        self.end_server()
        self.client.close()
        self._http.close()

    def end_server(self) -> None:
        """Stop a server of the run, also while `wait_until_ready` waits for it in another thread."""
        self._ended.set()
        if self.process is None:
            return
        waits = threading.Timer(NOTE_S, self._note, [f"the server at {self.url} stores its KV; log: {self._log}"])
        waits.start()
        # A start ends soon, except under Ray while the cluster has no place for the server. Then `end` ends it.
        locked = self._starting_or_ending.acquire(timeout=START_TIMEOUT_S)
        try:
            self.process.end()
        finally:
            waits.cancel()
            if locked:
                self._starting_or_ending.release()

    def _post(self, route: str, body: dict[str, Any], ignored_refusal: str | None = None) -> None:
        answer = self._http.post(route, json=body)
        if not answer.is_success and _refusal(answer) != ignored_refusal:
            raise RunError(f"POST {route}: {answer.status_code} {answer.text[:300]}")

    def _command(self) -> list[str]:
        config = self._config
        address = urlsplit(self.url)
        command = [sys.executable, "-m", "sglang_april.launch_server", f"--model-path={config.hf_checkpoint}"]
        command += [
            f"--host={address.hostname}",
            f"--port={address.port}",
            f"--april-quota={config.rollout_batch_size}",
        ]
        if config.engines > 1:
            command.append(f"--april-servers-per-machine={config.engines}")
        command += config.server_flags
        if config.server_journal and not any(flag.split("=")[0] == "--april-journal" for flag in config.server_flags):
            command.append(f"--april-journal={self._journal}")
        if config.api_key:
            command.append(f"--api-key={config.api_key}")
        on_gpus = uses_gpus(config.trainer_device)
        if config.colocate and on_gpus and MEMORY_SAVER not in command:
            command.append(MEMORY_SAVER)
        first_gpu = config.engine_gpus(self._number, on_gpus).start
        if first_gpu and not config.ray:  # Ray sets the visible GPUs of each actor
            command.append(f"--base-gpu-id={first_gpu}")
        return command


class RolloutEngines:
    """All engines of a run, and one client for them."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        cluster: "RayCluster | None" = None,
        note: Callable[[str], None] = print,
    ) -> None:
        urls: list[str | None] = [*config.servers] or [None] * config.engines
        self.each = [RolloutEngine(config, folder, number, url, cluster, note) for number, url in enumerate(urls)]
        clients = [engine.client for engine in self.each]
        self.client: AprilClient | EnginePool = clients[0] if len(clients) == 1 else EnginePool(clients)
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="engines")

    def wait_until_ready(self) -> None:
        """As `RolloutEngine.wait_until_ready`, concurrently."""
        self._call_all(RolloutEngine.wait_until_ready)

    def release(self) -> None:
        """As `RolloutEngine.release`."""
        self._call_all(RolloutEngine.release)

    def resume(self, *tags: str) -> None:
        """As `RolloutEngine.resume`."""
        self._call_all(lambda engine: engine.resume(*tags))

    def close(self) -> None:
        """As `RolloutEngine.close`."""
        self._call_all(RolloutEngine.close)
        self._threads.shutdown()

    def end_servers(self) -> None:
        """As `RolloutEngine.end_server`, concurrently, also while other calls are in progress."""
        with ThreadPoolExecutor(len(self.each)) as threads:
            call_all(threads, [engine.end_server for engine in self.each])

    def _call_all(self, call: Callable[[RolloutEngine], None]) -> None:
        call_all(self._threads, [partial(call, engine) for engine in self.each])


def _refusal(answer: httpx.Response) -> str:
    """The reason in a 400 reply; empty for any other reply."""
    if answer.status_code != httpx.codes.BAD_REQUEST:
        return ""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _server_process(record: Path, config: Config, cluster: "RayCluster | None") -> ServerProcess:
    if cluster is None:
        return LocalServerProcess(record)
    from trainer_bridge.ray_server import RayServer

    return RayServer(record.resolve(), cluster, config.server_gpus)
