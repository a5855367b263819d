"""Starts patched servers in process groups of their own, and ends them also after an error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from rich.console import Console

from examples.april_demo.settings import ROOT, Settings
from trainer_bridge.server_process import free_port

START_TIMEOUT_S = 600.0


class ServerError(RuntimeError):
    """The server did not start; the message names its log."""


GPU_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def has_gpu() -> bool:
    """Whether torch sees a GPU. Checked only with a driver, in a separate process: importing torch takes seconds."""
    if not any(Path(node).exists() for node in GPU_NODES):
        return False
    asked = [sys.executable, "-c", "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"]
    return subprocess.run(asked, check=False, capture_output=True).returncode == 0


def command(settings: Settings, port: int, gpu: bool, extra: list[str]) -> list[str]:
    """The launch command. The server publishes its load at every step, because the demo measures by it.

    Its memory leaves room for a second server.
    """
    # fmt: off
    flags = [
        "--model-path", str(settings.model),
        "--host", "127.0.0.1", "--port", str(port),
        "--april-quota", str(settings.groups), "--april-kv", "keep",
        "--max-running-requests", str(settings.slots),
        "--load-snapshot-publish-interval", "1",
        "--skip-server-warmup",
        "--log-level", "info",
        "--mem-fraction-static", "0.4" if gpu else "0.6", "--max-total-tokens", "60000",
    ]
    if gpu:  # these take any size of a head
        flags += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    else:
        flags += [
            "--device", "cpu", "--dtype", "float32",
            "--disable-overlap-schedule", "--sleep-on-idle",
        ]
    # fmt: on
    return [sys.executable, "-m", "sglang_april.launch_server", *flags, *extra]


def environment(gpu: bool) -> dict[str, str]:
    """The server's environment. On a CPU one thread per process: more do not speed up a tiny model, and on a busy
    machine threads that wait for each other take a hundred times as long as the step."""
    variables = dict(os.environ)
    if not gpu:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            variables.setdefault(name, "1")
    return variables


def last_line(log: Path) -> str:
    """The last line of the server's log: usually why it ended."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path, console: Console) -> float:
    """Wait for the server, showing the elapsed time; returns the seconds it took."""
    started = time.monotonic()
    with console.status("") as status:
        while (elapsed := time.monotonic() - started) < START_TIMEOUT_S:
            status.update(f"starting (30–90 s, mostly imports) … {elapsed:.0f} s")
            if process.poll() is not None:
                code, last = process.returncode, last_line(log)
                raise ServerError(f"the server ended with code {code} at its start: {last}\nits log: {log}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                    return elapsed
            time.sleep(0.5)
    raise ServerError(f"the server was not up after {START_TIMEOUT_S:.0f} s; its log: {log}")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, and after three seconds kill what remains of the servers' process groups."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + 3
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def running_server(settings: Settings, out: Path, console: Console, extra: list[str]) -> Iterator[str]:
    """Run a server for the duration of the context; yields its URL."""
    with running_servers(1, settings, out, console, extra) as (url,):
        yield url


@contextlib.contextmanager
def running_servers(
    count: int, settings: Settings, out: Path, console: Console, extra: list[str]
) -> Iterator[list[str]]:
    """Run servers for the duration of the context, which start at the same time; yields their URLs."""
    gpu = has_gpu()
    ports = [free_port() for _ in range(count)]
    logs = [out / (f"server-{number}.log" if number else "server.log") for number in range(count)]
    what = "the engine runs" if count == 1 else f"{count} engines run"
    console.print(f"{what} on {'the GPU' if gpu else 'the CPU'}; log: {', '.join(map(str, logs))}", soft_wrap=True)
    processes: list[subprocess.Popen[bytes]] = []
    # A terminated demo must still end its servers: SIGTERM becomes an ordinary exit.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for port, log in zip(ports, logs, strict=True):
            processes.append(start(command(settings, port, gpu, extra), gpu, log))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        started = time.monotonic()
        for process, url, log in zip(processes, urls, logs, strict=True):
            wait_until_up(process, url, log, console)
        console.print(f"server{'s' * (count > 1)} up after {time.monotonic() - started:.0f} s")
        yield urls
    finally:
        end(processes)
        signal.signal(signal.SIGTERM, previous)


def start(words: list[str], gpu: bool, log: Path) -> subprocess.Popen[bytes]:
    """Start a server in a process group of its own."""
    with log.open("wb") as sink:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(gpu),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
