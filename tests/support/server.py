"""A patched SGLang server on the CPU for tests, driven over HTTP and killed by process group."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.fork_server import Forked, ForkServer
from trainer_bridge.server_process import free_port

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 450.0
SLOTS = 48
COMMON = [
    "--mem-fraction-static=0.6",
    "--context-length=2048",
    f"--max-running-requests={SLOTS}",
    "--chunked-prefill-size=64",
    "--dtype=float32",
    "--sleep-on-idle",
]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it has just ended
        return False


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@dataclass(eq=False)
class Server:
    """Arguments of one server, and the process once it runs."""

    name: str
    model: Path
    flags: Sequence[str]
    folder: Path
    """Folder of its log, digest files and switches."""
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    fork_server: ForkServer | None = None
    """The process it is forked from; None starts a process that imports SGLang itself."""
    process: subprocess.Popen[bytes] | Forked | None = None
    http: httpx.Client = field(default_factory=httpx.Client)
    loaded: Path | None = None
    """The last policy that a test pushed."""
    version: int = 0
    """The policy version after the last `push`; if the server has another one, its weights are unknown."""
    reset_failure: str = ""
    """What the last `reset` could not undo."""
    _forwards: list[dict[str, Any]] = field(default_factory=list)
    _read_to: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def may_be_forked(self) -> bool:
        """The fork server has imported SGLang, which reads most of its own variables then; timeouts at each use."""
        return all(name.startswith(("SGLANG_APRIL", "SGLANG_REQ_")) for name in self.env)

    def spawn(self) -> None:
        """Start the process; `wait` returns when it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "SGLANG_APRIL_CHECK": "1",
            "APRIL_TEST_FOLDER": str(self.folder),
            "PYTHONUNBUFFERED": "1",
            # Several servers share few cores: threads that wait for each other make a step ten times as long.
            "OMP_NUM_THREADS": "1",
            # A scheduler that dies takes the server with it at once, so that a test fails instead of waiting.
            "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": "1",
            **self.env,
        }
        argv = [f"--model-path={self.model}", f"--port={self.port}", "--april-quota=4", "--april-kv=keep"]
        argv += [*COMMON, *self.flags, *os.environ.get("APRIL_TEST_SERVER_OPTIONS", "").split()]
        if self.log.exists():  # of a server that has died, or was replaced
            self.log.rename(self.folder / f"{self.name}.{len(list(self.folder.glob('*.log')))}.log")
        with self.log.open("wb") as log:
            if self.fork_server is not None:
                assert self.may_be_forked, f"SGLang was imported without {self.env}"
                self.process = self.fork_server.start(argv, env, self.log, ROOT)
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.launch", *argv],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> "Server":
        self.http = httpx.Client(base_url=self.url, timeout=180)
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.HTTPError):
                if self.http.get("/health", timeout=5).status_code == 200:
                    return self
            time.sleep(0.5)
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        self.stop()
        raise RuntimeError(f"server {self.name} did not come up:\n{tail}")

    def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None
        self.http.close()

    def terminate(self, timeout_s: float = 90.0) -> bool:
        """End all processes with SIGTERM; return False if they had to be killed."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.stop()
        return not left

    def processes(self) -> list[int]:
        """Processes of the server's group that still run, also after its end."""
        assert self.process is not None
        group = self.process.pid
        return [p.pid for p in psutil.process_iter() if _group(p.pid) == group and _runs(p)]

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # --- requests

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, status: int = 200) -> Any:
        reply = self.http.post(path, json=body if body is not None else {})
        assert reply.status_code == status, f"{path}: {reply.status_code} {reply.text[:500]}"
        return reply.json() if "json" in reply.headers.get("content-type", "") else reply.text

    def rollout(self, *, status: int = 200, **body: Any) -> Any:
        return self.post("/april/rollout", body, status=status)

    def state(self) -> dict[str, Any]:
        return dict(self.http.get("/april/state").json())

    def partials(self, run: str) -> list[dict[str, Any]]:
        return list(self.http.get("/april/partials", params={"run": run}).json()["partials"])

    def drain(self, run: str, **body: Any) -> list[dict[str, Any]]:
        """Finish everything a run has left and return the groups."""
        return list(self.rollout(run=run, prompts=[], quota=None, **body)["finished"])

    def push(self, model: Path, *, version: int | None = None, flush: bool = True) -> int:
        """Push a model from disk between begin and end; return the new policy version."""
        named = {} if version is None else {"version": version}
        self.post("/april/push/begin", named)
        self.loaded = model
        reply = self.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": flush})
        assert reply["success"], reply
        self.version = int(self.post("/april/push/end", named)["policy_version"])
        return self.version

    def reset(self) -> bool:
        """Reset the server after a test, also a failed one; return False if it has to be replaced.

        Afterwards nothing is paused, released, pushed or open, no run has anything left, and the policy is the first.
        """
        try:
            self._undo()
            state = self.state()
        except (httpx.HTTPError, AssertionError, ValueError) as error:
            self.reset_failure = f"{type(error).__name__}: {error}"
            return False
        left = {name: state[name] for name in ("closed", "frozen", "rounds") if state[name]}
        if sum(state["samples"].values()):
            left["samples"] = state["samples"]
        self.reset_failure = str(left) if left else ""
        return not left

    def _undo(self) -> None:
        self._switches_off()
        self.http.post("/continue_generation", json={"torch_empty_cache": False})
        if released := re.search(r"memory is released \((.*?)\)", self.state()["closed"]):
            self.post("/resume_memory_occupation", {"tags": released[1].split(", ")})
        for round_id in self.state()["http"]["rounds"]:
            self.post(f"/april/rounds/{round_id}/stop")
        state = self.state()
        runs = {name for name, left in state["runs"].items() if left["groups"]}
        runs |= {name for name, left in state["trajectories"].items() if left["undelivered"]}
        for run in runs:
            self.post("/april/drop", {"run": run})
        state = self.state()
        if state["closed"] or self.loaded not in (None, self.model) or state["policy_version"] != self.version:
            self.push(self.model)

    # --- instruments (tests/support/launch.py)

    def remove_guard(self, name: str | None) -> None:
        """Remove one guard in the running scheduler (None restores all)."""
        (self.folder / "guard").write_text(name or "")

    @contextlib.contextmanager
    def slowed(self, seconds: float = 0.1) -> Iterator[None]:
        """Every forward takes at least this long, so that samples still run when a test checks them."""
        with self._switched("slow", str(seconds)):
            yield

    @contextlib.contextmanager
    def stalls_detected(self) -> Iterator[Path]:
        """Calls in a step that would make the host wait for a GPU are written to this file (sync_detector.py)."""
        out = self.folder / "stalls.txt"
        out.write_text("")
        with self._switched("stalls", "on"):
            yield out

    @contextlib.contextmanager
    def grammars_held(self) -> Iterator[None]:
        """No regex is compiled."""
        with self._switched("grammars", "held"):
            yield

    @contextlib.contextmanager
    def fault(self, name: str) -> Iterator[None]:
        """Activate a fault of rank 1 (faults.py)."""
        with self._switched("fault", name):
            yield

    @contextlib.contextmanager
    def raising(self, place: str, name: str) -> Iterator[None]:
        """One of the functions in faults.py raises, on a rank ("rank 1") or in "the HTTP process"."""
        with self._switched("exception", f"{place}: {name}"):
            yield

    @contextlib.contextmanager
    def rates(self, token_s: float, copy_s: float) -> Iterator[None]:
        """Set the rates of `kv: auto`: seconds to prefill a token, and to copy one to or from any tier.

        The scheduler reads the switch in a forward and broadcasts the rates, so they apply some steps later.
        """
        copies = {"host": [copy_s, copy_s], "disk": [copy_s, copy_s]}
        with self._switched("rates", json.dumps([token_s, 0.0, copies])):
            self.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
            while (self.state()["kv_cost"] or {}).get("token_s") != token_s:
                assert self.alive
                time.sleep(0.01)
            yield

    @contextlib.contextmanager
    def _switched(self, name: str, value: str) -> Iterator[None]:
        (self.folder / name).write_text(value)
        try:
            yield
        finally:
            (self.folder / name).write_text("")

    def _switches_off(self) -> None:
        for name in ("guard", "slow", "grammars", "fault", "exception", "rates"):
            (self.folder / name).write_text("")

    def sleeps(self) -> list[float]:
        """Return the times at which the idle loop went to sleep, in seconds since the epoch."""
        path = self.folder / "sleeps.jsonl"
        return [json.loads(line)["at"] for line in path.read_text().splitlines()] if path.exists() else []

    def forwards(self) -> list[dict[str, Any]]:
        """Return every forward of the model so far, recorded by a wrapper on the model runner."""
        path = self.folder / "forwards.jsonl"
        if path.exists():
            with path.open("rb") as lines:
                lines.seek(self._read_to)
                whole = lines.read().rpartition(b"\n")[0]  # the last line may be half written
            if whole:
                self._read_to += len(whole) + 1
                self._forwards += map(json.loads, whole.split(b"\n"))
        return list(self._forwards)
