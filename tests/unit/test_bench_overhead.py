"""bench.overhead: what the servers of a pair run on, and what a pair is compared with."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.overhead import pairs
from bench.server_pairs import Side, exchanged_cores

SERVER = """
import socket, threading
listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(listener.getsockname()[1], flush=True)
threading.Event().wait()
"""


@pytest.fixture
def servers() -> Iterator[dict[str, int]]:
    """URL and process id of two processes of two threads that listen."""
    processes = [
        subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(2)
    ]
    try:
        yield {f"http://127.0.0.1:{process.stdout.readline().strip()}": process.pid for process in processes}  # type: ignore[union-attr]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def cores(pid: int) -> set[int]:
    """Cores of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return set().union(*(os.sched_getaffinity(int(thread.name)) for thread in threads))


def test_two_servers_exchange_their_cores(servers: dict[str, int]) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    first, second = servers.values()
    seen = set()
    with exchanged_cores(list(servers)):
        deadline = time.monotonic() + 20
        while len(seen) < 2 and time.monotonic() < deadline:
            seen.add((tuple(cores(first)), tuple(cores(second))))
            seen = {pair for pair in seen if all(len(one) == 1 for one in pair) and pair[0] != pair[1]}
    assert len(seen) == 2
    assert cores(first) == cores(second) == allowed


def test_the_control_needs_a_second_stock_server() -> None:
    alone = pairs("stock", "april", None, endless=1)
    assert [pair.case for pair in alone] == ["unattached", "attached", "round open"]
    control, *rest = pairs("stock", "april", "second", endless=1)
    assert (control.case, control.stock, control.other) == ("control", Side("stock"), Side("second"))
    assert {(pair.stock.url, pair.other.url) for pair in (*alone, *rest)} == {("stock", "april")}
