"""The engine of a run: a server that was given, or one that is started here and ended with the run."""

import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from sglang_april.client import AprilClient
from trainer_bridge.config import Config
from trainer_bridge.engine_pool import EnginePool
from trainer_bridge.push.pusher import on_all
from trainer_bridge.server_process import EngineGoneError, EngineLostError, LocalServerProcess, ServerProcess
from trainer_bridge.validate import RunError

if TYPE_CHECKING:
    from trainer_bridge.ray_cluster import RayCluster

POLL_S = 0.5
ANSWER_S = 600.0
"""The memory calls answer within that, or the engine hangs."""
NOT_RELEASED = "tags: {} cannot be resumed, because it is not released"
"""What a server says that has released none of these tags."""


class RolloutEngine:
    """Where rounds and weights go: its URL, the client, and the memory calls of the colocated cycle.

    A server of our own keeps a journal in the run's folder, so that its death costs no sample. It outlives a trainer
    that is killed: the next one finds it by its record, with all that it carries.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        number: int = 0,
        url: str | None = None,
        cluster: "RayCluster | None" = None,
    ) -> None:
        """`url`: of a server that was given; `number`: of one that is started here (or by Ray), among several."""
        name = f"server-{number}" if number else "server"
        self._config, self._number, self._log = config, number, folder / f"{name}.log"
        self._journal = folder / f"{name}.journal"
        self._own: ServerProcess | None = None
        if url is None:
            self._own = _own_server(folder / f"{name}.json", config, cluster)
            url = self._own.url or self._own.new_url()
        self.url = url
        self.client = AprilClient(self.url, config.api_key)
        headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        self._http = httpx.Client(base_url=self.url, timeout=ANSWER_S, headers=headers)

    def ready(self) -> None:
        """Wait until the server serves; start it if that is ours to do and it does not run.

        Raises `EngineLostError` where a server of ours has ended, `EngineGoneError` where none serves in time.
        """
        own, limit = self._own, self._config.server_start_timeout
        if own is not None and not own.alive:
            own.start(self._command(), self.url, self._log)
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            if own is not None and not own.alive:
                raise EngineLostError(f"the server has ended; its log: {self._log}")
            with contextlib.suppress(httpx.HTTPError):
                if self._http.get("/health", timeout=5).status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
        raise EngineGoneError(f"the server at {self.url} does not serve within {limit:g} s (server_start_timeout)")

    def release(self) -> None:
        """The engine gives up its weights and KV pool; partials are evacuated first (S2)."""
        self._post("/release_memory_occupation", {})

    def resume(self, *tags: str) -> None:
        """It takes back its `weights`, or its `kv_cache` and `cuda_graph`.

        A server that was started again since the release has them all: its refusal for that reason is no failure.
        """
        done = NOT_RELEASED.format(", ".join(sorted(tags)))
        self._post("/resume_memory_occupation", {"tags": tags}, unless=done)

    def close(self) -> None:
        """End what was started here."""
        self.client.close()
        self._http.close()
        if self._own is not None:
            self._own.end()

    def _post(self, route: str, body: dict[str, Any], unless: str | None = None) -> None:
        """`unless`: the refusal that counts as success."""
        answer = self._http.post(route, json=body)
        if not answer.is_success and _refusal(answer) != unless:
            raise RunError(f"POST {route}: {answer.status_code} {answer.text[:300]}")

    def _command(self) -> list[str]:
        config = self._config
        at = urlsplit(self.url)
        command = [sys.executable, "-m", "sglang_april.launch_server", f"--model-path={config.hf_checkpoint}"]
        command += [f"--host={at.hostname}", f"--port={at.port}", f"--april-quota={config.rollout_batch_size}"]
        command += config.server_flags
        if config.server_journal and not any(flag.startswith("--april-journal") for flag in config.server_flags):
            command.append(f"--april-journal={self._journal}")
        if config.api_key:
            command.append(f"--api-key={config.api_key}")
        if self._number and not config.ray:  # Ray shows each actor its own GPUs
            command.append(f"--base-gpu-id={self._number * config.server_gpus}")
        return command


class RolloutEngines:
    """All engines of a run, and one client for them."""

    def __init__(self, config: Config, folder: Path, cluster: "RayCluster | None" = None) -> None:
        urls: list[str | None] = [*config.servers] or [None] * config.engines
        self.each = [RolloutEngine(config, folder, number, url, cluster) for number, url in enumerate(urls)]
        clients = [engine.client for engine in self.each]
        self.client: AprilClient | EnginePool = clients[0] if len(clients) == 1 else EnginePool(clients)
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="engines")

    def ready(self) -> None:
        """As `RolloutEngine.ready`, of all at once."""
        self._on_all(RolloutEngine.ready)

    def release(self) -> None:
        """As `RolloutEngine.release`."""
        self._on_all(RolloutEngine.release)

    def resume(self, *tags: str) -> None:
        """As `RolloutEngine.resume`."""
        self._on_all(lambda engine: engine.resume(*tags))

    def close(self) -> None:
        """End what was started here."""
        self._on_all(RolloutEngine.close)
        self._threads.shutdown()

    def _on_all(self, call: Callable[[RolloutEngine], None]) -> None:
        on_all(self._threads, [partial(call, engine) for engine in self.each])


def _refusal(answer: httpx.Response) -> str:
    """The reason that a memory call was refused for; empty for any other failure."""
    if answer.status_code != httpx.codes.BAD_REQUEST:
        return ""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _own_server(record: Path, config: Config, cluster: "RayCluster | None") -> ServerProcess:
    if cluster is None:
        return LocalServerProcess(record)
    from trainer_bridge.ray_server import RayServer

    return RayServer(record.resolve(), cluster, config.server_gpus)
