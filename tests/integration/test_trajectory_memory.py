"""Three hundred trajectories in rounds, with a journal and little device and host memory: nothing of a delivered one
stays in the scheduler, in the HTTP process or in the journal."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.conftest import SMALL, Pool
from tests.integration.test_memory import scheduler_mb
from tests.integration.test_trajectories import PROMPT, leg, open_round
from tests.support.live import LiveServer, live_server

TRAJECTORIES, ROUND, AT_ONCE = 300, 20, 4
METADATA = "x" * 400_000
"""With each trajectory, so that one that stays anywhere shows there: those of ten rounds take 80 MB."""
SETTLED = 5
"""Rounds after which every buffer has been used."""
GROWTH_MB = 60
"""Allowed growth of a process and of the journal after that."""


@pytest.fixture(params=["overlap", "normal"])
def journalled(
    request: pytest.FixtureRequest,
    pool: Pool,
    models: Callable[[str, int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LiveServer, Path]]:
    """A server with little memory, and its journal; with each loop."""
    journal = tmp_path_factory.mktemp("journal") / "journal"
    loop = ["--disable-overlap-schedule"] if request.param == "normal" else []
    flags = [*SMALL, *loop, f"--april-journal={journal}"]
    server = pool.get(f"small journalled {request.param}", flags, "llama", forked=True)
    with live_server(server, lambda seed: models("llama", seed)) as live:
        yield live, journal
    server.stop()


def agent(live: LiveServer, run: str, name: str, number: int) -> None:
    """Two turns, and their reward."""
    history = [number % 500, number // 500, *PROMPT]  # equal prompts would share their pages
    for _ in range(2):
        history += [*leg(live, run, name, history)["output_ids"], 3, 4]
    body = {"run": run, "trajectories": {name: {"reward": 1.0, "metadata": METADATA}}}
    live.server.post("/april/trajectories/done", body)


def sizes(live: LiveServer, journal: Path) -> dict[str, float]:
    """Resident memory of both processes and the size of the journal, in MB."""
    assert live.server.process is not None
    files = [path for path in journal.parent.iterdir() if path.name.startswith(journal.name)]
    return {
        "scheduler": scheduler_mb(live),
        "http": psutil.Process(live.server.process.pid).memory_info().rss / 2**20,
        "journal": sum(path.stat().st_size for path in files) / 2**20,
    }


def test_memory_and_journal_stay_flat_over_three_hundred_trajectories(
    journalled: tuple[LiveServer, Path], run: str
) -> None:
    """A push in each round moves the KV that is parked between two turns."""
    live, journal = journalled
    settled: dict[str, float] = {}
    delivered = list[str]()
    for number in range(int(os.environ.get("APRIL_TRAJECTORIES", TRAJECTORIES)) // ROUND):
        reply = open_round(live, run, quota=ROUND, round_id=f"{run}-{number}")
        numbers = range(number * ROUND, (number + 1) * ROUND)
        with ThreadPoolExecutor(AT_ONCE) as agents:
            running = [agents.submit(agent, live, run, f"t{i}", i) for i in numbers]
            running[ROUND // 2].result()
            live.push(number % 2)
        for future in running:
            future.result()
        ended: dict[str, Any] = live.result_of(reply)
        delivered += [trajectory["id"] for trajectory in ended["trajectories"]]
        assert all(len(trajectory["legs"]) == 2 for trajectory in ended["trajectories"])
        assert ended["carried"]["trajectories"] == []
        state = live.server.state()
        assert state["parked_tokens"] == state["pool"]["held"] == sum(state["tokens"].values()) == 0
        if number + 1 == SETTLED:
            settled = sizes(live, journal)
    assert sorted(delivered) == sorted(f"t{i}" for i in range(len(delivered)))
    grown = {name: size - settled[name] for name, size in sizes(live, journal).items()}
    print(f"{len(delivered)} trajectories; growth in MB after {SETTLED * ROUND}: {grown}")
    assert max(grown.values()) < GROWTH_MB, grown
