"""Stock and patched SGLang servers with the same model and flags. The idle one uses no CPU time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.record import ROOT
from examples.april_demo.server import has_gpu, last_line
from sglang_april.cpu import pace
from trainer_bridge.server_process import free_port

START_LIMIT_S = 600.0


class ServerError(RuntimeError):
    """A server did not start; the message names its log."""


@dataclass(frozen=True)
class Size:
    """Sizes and flags of both servers."""

    model: Path
    slots: int
    context: int
    pool_tokens: int
    """KV pool of each server. The patched one holds the partials of several alternating runs."""
    extra: tuple[str, ...] = ()
    launcher: str = "sglang_april.launch_server"
    """Module that starts the patched server."""
    stock_launcher: str = "sglang.launch_server"
    pace: Path | None = None
    """Table of step times (`--april-cpu-pace`) for both servers, which then run the overlap loop as on a GPU."""


FIRST, LAST = "0.5", "0.85"
"""`--mem-fraction-static` of the first of two servers on a GPU, and of the last. The pools have the requested size, or
`both_servers` raises."""


def command(size: Size, port: int, patched: bool, gpu: bool, share: str = LAST) -> list[str]:
    """The launch command. Load snapshots are published at every step, because all variants are measured by them."""
    # fmt: off
    flags = [
        "--model-path", str(size.model), "--host", "127.0.0.1", "--port", str(port),
        "--max-running-requests", str(size.slots), "--context-length", str(size.context),
        "--load-snapshot-publish-interval", "1", "--grammar-backend", "none", "--skip-server-warmup",
        "--log-level", "warning", "--max-total-tokens", str(size.pool_tokens),
    ]
    flags += ["--mem-fraction-static", share] if gpu else [
        "--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.6", "--sleep-on-idle",
    ]
    flags += ["--chunked-prefill-size", "8192"] if size.pace else [] if gpu else ["--disable-overlap-schedule"]
    # fmt: on
    start = [size.launcher, "--april-quota", "1", "--april-kv", "keep"] if patched else [size.stock_launcher]
    return [sys.executable, "-m", *start, *flags, *size.extra]


@contextlib.contextmanager
def both_servers(size: Size, folder: Path) -> Iterator[tuple[str, str]]:
    """URLs of a stock and a patched server, which end with the context. On a CPU they start together; on a GPU one
    after the other, because each takes a fraction of the free memory."""
    gpu = has_gpu()
    with contextlib.ExitStack() as stack:
        started = []
        for patched, share in ((False, FIRST), (True, LAST)):
            started.append(stack.enter_context(_running(size, folder, patched, gpu, share)))
            if gpu:
                _wait(*started[-1])
        for one in started:
            _wait(*one)
        urls = started[0][1], started[1][1]
        pools = [httpx.get(f"{url}/server_info").json()["max_total_num_tokens"] for url in urls]
        if min(pools) < size.pool_tokens:
            raise ServerError(
                f"two pools of {size.pool_tokens:,} tokens do not fit: {pools[0]:,} and {pools[1]:,}; "
                "start a server on a GPU of its own each, and name them (--server, --stock-server)"
            )
        yield urls


@contextlib.contextmanager
def patched_server(size: Size, folder: Path) -> Iterator[str]:
    """URL of a patched server."""
    with _running(size, folder, True, has_gpu()) as (process, url, log):
        _wait(process, url, log)
        yield url


@contextlib.contextmanager
def stock_server(size: Size, folder: Path) -> Iterator[str]:
    """URL of a stock server."""
    with _running(size, folder, False, has_gpu()) as (process, url, log):
        _wait(process, url, log)
        yield url


def processes(url: str) -> list[psutil.Process]:
    """The processes of the server at `url`, on this machine."""
    port = int(url.rpartition(":")[2])
    tcp = psutil.net_connections(kind="tcp")
    pid = next(one.pid for one in tcp if one.status == psutil.CONN_LISTEN and one.laddr.port == port)
    http = psutil.Process(pid)
    return [http, *http.children(recursive=True)]


def cpu_seconds(url: str) -> float:
    """CPU time that the processes of the server at `url`, on this machine, have used."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes(url)))


@contextlib.contextmanager
def _running(
    size: Size, folder: Path, patched: bool, gpu: bool, share: str = LAST
) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    folder.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), folder / f"{'april' if patched else 'stock'}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not gpu:
        # The portable CPU platform is the engine of both; one thread each, or they wait for one another.
        environment |= {"SGLANG_APRIL_CPU": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment |= {pace.ENV: str(size.pace)} if size.pace else {}
    elif size.pace:
        raise ServerError("a paced preset runs on the CPU platform, and this machine has a GPU")
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command(size, port, patched, gpu, share),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"a server ended at its start: {last_line(log)}\nits log: {log}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise ServerError(f"a server was not up after {START_LIMIT_S:.0f} s; its log: {log}")
