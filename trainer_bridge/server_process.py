"""A server process that belongs to a run: it outlives a trainer that is killed, and the next trainer finds it again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

from trainer_bridge.ports import free_port

GRACE_S = 10.0
"""Between the request to end and the kill."""


class EngineLostError(RuntimeError):
    """The server does not answer; looking for it again may help. The message says what is known."""


class EngineGoneError(RuntimeError):
    """The server does not come back: the run ends, and can go on later from its last checkpoint."""


class ServerProcess(Protocol):
    """A server that the run starts and ends: a process of this machine, or one in a Ray actor (`ray_server.py`)."""

    @property
    def url(self) -> str | None:
        """Of a server that an earlier trainer of this run started and that still runs."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""

    def new_url(self) -> str:
        """Where one may be started."""

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """Start it there, once nothing is left of the last one, which may hold memory and journal."""

    def end(self) -> None:
        """End it and all that it started."""


class LocalServerProcess:
    """The process of `record`: its number, when it began (numbers are used again), and its URL.

    `tied`: it is killed when this process dies.
    """

    def __init__(self, record: Path, *, tied: bool = False) -> None:
        self._record, self._tied = record, tied
        self._process: psutil.Process | None = None
        self.url: str | None = None
        """Of a server that an earlier trainer of this run started and that still runs."""
        if record.exists():
            known = json.loads(record.read_text())
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(known["pid"])
                if process.create_time() == known["began"] and process.status() != psutil.STATUS_ZOMBIE:
                    self._process, self.url = process, known["url"]

    @property
    def alive(self) -> bool:
        """Whether it runs; a child that has ended is buried by this."""
        process = self._process
        if isinstance(process, psutil.Popen):
            return process.poll() is None
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    def new_url(self, host: str = "127.0.0.1") -> str:
        """As `ServerProcess.new_url`."""
        return f"http://{host}:{free_port(host)}"

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """In a process group of its own, once nothing is left of the last one, which may hold memory and journal."""
        self._kill_group()
        self._record.parent.mkdir(parents=True, exist_ok=True)
        if self._tied:
            command = [sys.executable, "-m", "trainer_bridge.die_with_parent", str(os.getpid()), *command]
        with log.open("ab") as out:
            process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._process = process
        part = self._record.with_suffix(".part")
        part.write_text(json.dumps({"pid": process.pid, "began": process.create_time(), "url": url}))
        part.replace(self._record)

    def end(self) -> None:
        """End it and all that it started."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            self._process.wait(GRACE_S)
        self._kill_group()
        self._record.unlink(missing_ok=True)

    def _kill_group(self) -> None:
        """What is left of its process group. The number stays taken for as long as anything is."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.wait()
        self._process = None
