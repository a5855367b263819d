"""A server of two machines, both of which are this one: ranks are started by two commands and communicate over TCP."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import Pool
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import prompt
from trainer_bridge.server_process import free_port

Start = Callable[..., list[Server]]


@pytest.fixture
def start(pool: Pool, models: Callable[[str, int], Path], tmp_path: Path) -> Iterator[Start]:
    """Start both halves of a server, the second with additional flags."""
    nodes: list[Server] = []

    def start(*flags_of_second: str) -> list[Server]:
        pool.make_room()
        common = ["--tp-size=2", "--nnodes=2", f"--dist-init-addr=127.0.0.1:{free_port()}", "--max-total-tokens=4000"]
        for rank, more in enumerate([(), flags_of_second]):
            folder = tmp_path / f"node{rank}"
            flags = [*common, f"--node-rank={rank}", *more]
            node = Server(f"node{rank}", models("llama", 0), flags, folder, {})
            node.fork_server = pool.fork_server
            nodes.append(node)
            node.spawn()
        return nodes

    yield start
    for node in nodes:
        node.stop()


def test_rounds_and_copies_over_tcp(start: Start, run: str) -> None:
    """Copies end once both machines have reported them; budgets are the smallest of both."""
    first, _ = start("--april-host-gb=0.001")
    first.wait()
    assert first.state()["store"]["cap_tokens"]["host"] == 10**6 // (16 * 1024) * 16
    left = first.rollout(run=run, prompts=[prompt("short", 4), prompt("long", 30, n=3)], quota=1, tier="host")
    assert left["carried"]["tokens_by_tier"]["host"] > 0
    until(lambda: not first.state()["store"]["in_flight"], "both ranks have reported their copies")
    last = first.rollout(run=run, prompts=[], quota=None)
    assert last["stats"]["resumed_kept"] == 3
    assert first.http.get("/april/check").json() == {"ok": True, "problem": ""}


@pytest.mark.ends_server
def test_machines_with_different_flags_do_not_serve(start: Start) -> None:
    first, second = start("--april-max-staleness=3")
    with pytest.raises(RuntimeError, match="did not come up"):
        first.wait()
    sentence = "sglang-april: all TP ranks must agree on --april-max-staleness, but rank 1 has 3 and rank 0 has 5."
    for node in (first, second):
        until(lambda node=node: sentence in node.log.read_text(errors="replace"), "each machine reports it")
