"""`bench.agents pairs`: `sglang.bench_serving` on a stock and a patched server, and on two stock servers as a control.

On a CPU both servers of a pair are measured at the same time, each on one core, and exchange the cores: the speed of a
shared machine drifts by more than what is measured, and so does each core's. They are started anew for every few pairs,
because two processes of one program may differ by several percent for as long as they live.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench import record
from bench.agent_turns import HEADERS
from bench.overhead import serve
from bench.rollout.servers import Size, both_servers, cpu_seconds, processes, stock_server

EXCHANGE_S = 0.1
"""Seconds between two exchanges of the cores: short beside a measurement, long beside what moving a thread costs."""
FLUSH_LIMIT_S = 60.0


@dataclass(frozen=True)
class Pair:
    """A server that is compared with a stock server."""

    case: str
    stock: str
    """URL."""
    other: str
    headers: Mapping[str, str]


def pairs(stock: str, april: str, second_stock: str | None) -> list[Pair]:
    """The pairs of one repetition; the control needs a second stock server."""
    control = [Pair("control", stock, second_stock, {})] if second_stock else []
    return [*control, Pair("unattached", stock, april, {}), Pair("attached", stock, april, HEADERS)]


@dataclass(frozen=True)
class PairLoad:
    """What is measured. `repetitions` are those of each launch of the servers."""

    prompts: int
    at_once: int
    launches: int
    repetitions: int
    together: bool


def measure_launches(size: Size, load: PairLoad, logs: Path) -> Iterator[list[record.Row]]:
    """The rows of one pair after the other."""
    seeds = itertools.count(1)
    for launch in range(load.launches):
        with contextlib.ExitStack() as stack:
            urls = stack.enter_context(both_servers(size, logs))
            second = stack.enter_context(stock_server(size, logs / "control")) if load.together else None
            for url in filter(None, (*urls, second)):
                serve(url, size.model, size.slots, load.at_once, 0)
            for repetition in range(load.repetitions):
                for pair in pairs(*urls, second):
                    reverse = (launch + repetition) % 2 == 1
                    rows = measure(pair, size.model, load, next(seeds), reverse=reverse)
                    yield [{**row, "launch": launch, "repetition": repetition} for row in rows]


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


def measure(pair: Pair, model: Path, load: PairLoad, seed: int, *, reverse: bool) -> list[record.Row]:
    """A row of the stock server and one of the other, which begins if `reverse`.

    The prefix caches are emptied first: a server with a full one evicts for every request. Each call needs a `seed` of
    its own, for prompts that no server has seen.
    """
    servers = [(pair.stock, {}), (pair.other, pair.headers)]
    order = servers[::-1] if reverse else servers

    def one(server: tuple[str, Mapping[str, str]]) -> record.Row:
        url, headers = server
        before = cpu_seconds(url)
        rate = serve(url, model, load.prompts, load.at_once, seed, headers)
        return {"output_tokens_per_s": rate, "cpu_ms_per_request": 1e3 * (cpu_seconds(url) - before) / load.prompts}

    for url, _ in servers:
        httpx.post(f"{url}/flush_cache", timeout=FLUSH_LIMIT_S).raise_for_status()
    if load.together:
        with exchanged_cores([url for url, _ in order]), ThreadPoolExecutor(len(order)) as threads:
            measured = list(threads.map(one, order))
    else:
        measured = [one(server) for server in order]
    stock, other = measured[::-1] if reverse else measured
    common = {"bench": "agents pairs", "together": load.together}
    ratio = other["output_tokens_per_s"] / stock["output_tokens_per_s"]
    return [
        {**common, "case": f"stock beside {pair.case}", **stock, "ratio": 1.0},
        {**common, "case": pair.case, **other, "ratio": ratio},
    ]
