"""Server processes that belong to a run. They outlive a trainer that is killed, and the next trainer finds them."""

import contextlib
import errno
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

from sglang_april import config

KILL_AFTER_S = 3.0
"""Seconds between SIGTERM and SIGKILL of a server that stores nothing; a journal survives both."""
PORTS = range(12_000, 22_000)
"""Below those of outgoing connections (Linux: from 32,768), which could take a port while its server starts; also with
the 10,000 that SGLang 0.5.15.post1 adds for a second port."""


ERROR_LINE = re.compile(r"(sglang-april: |[\w.]*(Error|Exception|Exit|Interrupt): )")
"""A refusal of the plugin, or the last line of a traceback."""
WARNING_LINE = re.compile(r"warnings\.warn\(|\S+: \w*Warning: |W\d{4} ")
"""A warning of Python, its source line, or a warning of torch: no news about a start."""


class EngineLostError(RuntimeError):
    """The server does not answer; reconnecting may help."""


class EngineGoneError(RuntimeError):
    """The server cannot be recovered. The run ends, and can be resumed from its last checkpoint."""


class ServerStartError(EngineGoneError):
    """The first start of a server failed, for example because it refuses one of `server_flags`."""


class ServerProcess(Protocol):
    """A server that the run starts and stops: a local process, or one in a Ray actor (`ray_server.py`)."""

    @property
    def url(self) -> str | None:
        """URL of a running server that an earlier trainer of this run started."""

    @property
    def alive(self) -> bool:
        """Whether the process is running."""

    def new_url(self) -> str:
        """An unused URL for a server."""

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """Start the server, after killing what is left of the last one, which may hold memory and the journal."""

    def end(self) -> None:
        """Stop the server and its children."""


def _began(pid: int) -> str:
    """The boot of the machine and the clock tick since then at which a process began, from proc(5). The creation time
    of psutil moves when the clock is set.

    Raises:
        OSError: there is no such process.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{boot} {after_name[19]}"


class LocalServerProcess:
    """A process of this machine, recorded in a file by pid, start (pids are reused) and URL."""

    def __init__(self, record: Path, *, die_with_parent: bool = False) -> None:
        """`die_with_parent`: the server is killed when this process dies."""
        self._record, self._die_with_parent = record, die_with_parent
        self._process: psutil.Process | None = None
        self.url: str | None = None
        """URL of a running server that an earlier trainer of this run started."""
        if record.exists():
            recorded = json.loads(record.read_text())
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                process = psutil.Process(recorded["pid"])
                if _began(process.pid) == recorded["began"] and process.status() != psutil.STATUS_ZOMBIE:
                    self._process, self.url = process, recorded["url"]

    @property
    def alive(self) -> bool:
        """Whether the process is running. Reaps a child that has exited."""
        process = self._process
        if isinstance(process, psutil.Popen):
            return process.poll() is None
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    @property
    def pid(self) -> int | None:
        """Process id of the server, which is also the id of its process group."""
        return None if self._process is None else int(self._process.pid)

    def new_url(self, host: str = "127.0.0.1") -> str:
        """As `ServerProcess.new_url`."""
        return f"http://{host}:{free_port(host)}"

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """As `ServerProcess.start`; the server gets a new process group."""
        self._kill_group()
        self._record.parent.mkdir(parents=True, exist_ok=True)
        if self._die_with_parent:
            command = [sys.executable, "-m", "trainer_bridge.die_with_parent", str(os.getpid()), *command]
        with log.open("ab") as out:
            process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._process = process
        part = self._record.with_suffix(".part")
        part.write_text(json.dumps({"pid": process.pid, "began": _began(process.pid), "url": url}))
        part.replace(self._record)

    def end(self) -> None:
        """As `ServerProcess.end`."""
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            timeout = termination_timeout_s(self._process.cmdline())
            self._process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                self._process.wait(timeout)
        self._kill_group()
        self._record.unlink(missing_ok=True)

    def _kill_group(self) -> None:
        """Kill the remaining processes of the group. Its id is not reused while any of them exists."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.wait()
        self._process = None


def termination_timeout_s(command: Sequence[str]) -> float:
    """Seconds between SIGTERM and SIGKILL for a server with this command line.

    With a journal and a disk tier it stores KV, and ends by itself after `--april-shutdown-s`.
    """
    try:
        flags = config.from_env(os.environ) | config.from_argv(command)
        if flags.get("journal") is None or flags.get("disk_dir") is None:
            return KILL_AFTER_S
        return KILL_AFTER_S + float(flags.get("shutdown_s", config.AprilConfig().shutdown_s))
    except ValueError:  # a wrong flag: this server has refused to start
        return KILL_AFTER_S


def last_error(log: Path, start: int = 0) -> str:
    """The last line of a server's log from byte `start` on that reports an error, or else its last line that is no
    warning."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    errors = [line for line in lines if ERROR_LINE.match(line)]
    return (errors or [line for line in lines if not WARNING_LINE.match(line)] or [""])[-1][:500]


def free_port(host: str = "127.0.0.1") -> int:
    """An unused TCP port of this machine at that address, on which a server of every SGLang release can listen.

    Raises:
        OSError: the address is not one of this machine, or no port is unused.
    """
    for port in secrets.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
    raise OSError(errno.EADDRINUSE, f"all ports from {PORTS[0]} to {PORTS[-1]} are in use")
