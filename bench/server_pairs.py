"""A load of `sglang.bench_serving` on two servers, whose rates are compared.

On a CPU both are measured at the same time, each on one core, and exchange the cores: the speed of a shared machine
drifts by more than what is measured, and so does each core's.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from bench import record
from bench.rollout.servers import cpu_seconds, processes

CLIENT = "sglang.bench_serving"
INPUT, OUTPUT = 32, 128
"""The most tokens of a prompt and of a response. Lengths are uniform from 1 on: requests of one length end and begin in
the same steps, until a delay sets them apart, and rates depend on such accidents."""
RUN_LIMIT_S = 600.0
FLUSH_LIMIT_S = 60.0
EXCHANGE_S = 0.1
"""Seconds between two exchanges of the cores: short beside a measurement, long beside what moving a thread costs."""


def nothing(_url: str) -> AbstractContextManager[None]:
    """No request beside the measured ones."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Side:
    """One server of a pair."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    beside: Callable[[str], AbstractContextManager[None]] = nothing
    """Keeps another request running on the server while it is measured."""


@dataclass(frozen=True)
class Pair:
    """A server that is compared with a stock server."""

    case: str
    stock: Side
    other: Side


def serve(
    url: str, model: Path, prompts: int, at_once: int, seed: int, headers: Mapping[str, str] | None = None
) -> float:
    """Output tokens/s of one run of SGLang's client with random ids and lengths, which `seed` gives.

    It runs in a fork of a process that has imported it, which takes longer than the measurement.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        # fmt: off
        options = [
            "--backend", "sglang", "--base-url", url, "--dataset-name", "random-ids", "--num-prompts", str(prompts),
            "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--random-range-ratio", "0.0",
            "--max-concurrency", str(at_once), "--seed", str(seed), "--model", str(model), "--tokenizer", str(model),
            "--tokenize-prompt", "--disable-stream", "--disable-tqdm", "--output-file", str(out),
        ]
        # fmt: on
        if headers:
            options += ["--header", *(f"{name}={value}" for name, value in headers.items())]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([CLIENT])
        client = context.Process(target=_client, args=(options, Path(folder) / "client.log"))
        client.start()
        client.join(RUN_LIMIT_S)
        if client.exitcode != 0:
            client.kill()
            raise RuntimeError(f"{CLIENT} failed:\n{(Path(folder) / 'client.log').read_text()[-2000:]}")
        return float(json.loads(out.read_text().splitlines()[-1])["output_throughput"])


def _client(options: list[str], log: Path) -> None:
    with log.open("w") as sink, contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        sys.argv = [CLIENT, *options]
        runpy.run_module(CLIENT, run_name="__main__")


@contextlib.contextmanager
def exchanged_cores(urls: Sequence[str]) -> Iterator[None]:
    """Two servers on a core each, which they exchange until the context ends."""
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)[:2]
    if len(cores) < 2:
        raise RuntimeError("two servers at the same time need two cores")
    servers = [processes(url) for url in urls]
    ended = threading.Event()

    def exchange() -> None:
        number = 0
        while not ended.wait(EXCHANGE_S):
            number += 1
            # The server that moves second shares its core with the other for a moment. The order changes at every
            # second exchange: if it changed at each, the same core would always be the shared one.
            first = number // 2 % 2
            for i in (first, 1 - first):
                _move(servers[i], {cores[(i + number) % 2]})

    for server, core in zip(servers, cores, strict=True):
        _move(server, {core})
    thread = threading.Thread(target=exchange, name="exchanged-cores")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for server in servers:
            _move(server, allowed)


def _move(server: Sequence[psutil.Process], cores: set[int]) -> None:
    for process in server:
        # Threads begin and end meanwhile.
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)


def measure(
    pair: Pair, model: Path, *, prompts: int, at_once: int, seed: int, together: bool, reverse: bool
) -> list[record.Row]:
    """A row of the stock server and one of the other, which begins if `reverse`.

    The prefix caches are emptied first: a server with a full one evicts for every request. Each call needs a `seed` of
    its own, for prompts that no server has seen.
    """
    order = [pair.other, pair.stock] if reverse else [pair.stock, pair.other]

    def one(side: Side) -> record.Row:
        before = cpu_seconds(side.url)
        rate = serve(side.url, model, prompts, at_once, seed, side.headers)
        return {"output_tokens_per_s": rate, "cpu_ms_per_request": 1e3 * (cpu_seconds(side.url) - before) / prompts}

    for side in order:
        httpx.post(f"{side.url}/flush_cache", timeout=FLUSH_LIMIT_S).raise_for_status()
    with contextlib.ExitStack() as stack:
        for side in order:
            stack.enter_context(side.beside(side.url))
        if together:
            stack.enter_context(exchanged_cores([side.url for side in order]))
            measured = list(stack.enter_context(ThreadPoolExecutor(len(order))).map(one, order))
        else:
            measured = [one(side) for side in order]
    stock, other = measured[::-1] if reverse else measured
    common = {"bench": "overhead", "together": together}
    ratio = other["output_tokens_per_s"] / stock["output_tokens_per_s"]
    return [
        {**common, "case": f"stock beside {pair.case}", **stock, "ratio": 1.0},
        {**common, "case": pair.case, **other, "ratio": ratio},
    ]
