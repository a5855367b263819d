"""A journal on a full disk: nothing new is accepted, `/health` says why, and what waits is answered later."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.conftest import NORMAL, Pool
from tests.support.background import BackgroundRound
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import prompt


@pytest.fixture
def journalled(pool: Pool, tmp_path: Path) -> Iterator[Server]:
    """A server with an empty journal that no other test shares."""
    server = pool.get("full disk", [*NORMAL, f"--april-journal={tmp_path / 'journal'}"], forked=True)
    yield server
    server.stop()


@contextlib.contextmanager
def no_space(server: Server, journal: Path) -> Iterator[None]:
    """No file of the scheduler can grow beyond the journal's present size."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    (scheduler,) = [child for child in children if "sglang::scheduler" in child.name() + " ".join(child.cmdline())]
    scheduler.rlimit(resource.RLIMIT_FSIZE, (journal.stat().st_size, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        scheduler.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_health_reports_a_full_disk_and_nothing_is_lost(journalled: Server, tmp_path: Path, run: str) -> None:
    server = journalled
    large = prompt("large", 4, metadata="m" * 2**20)  # the journal becomes the largest file
    server.rollout(run=f"{run}-before", prompts=[large], quota=None)
    assert server.http.get("/health").status_code == 200
    with no_space(server, tmp_path / "journal-wal"):
        waiting = BackgroundRound(server, run=run, prompts=[prompt("a", 20, n=2)], quota=None)
        health = until(lambda: failing(server), "/health reports the fault")
        assert health.json()["error"]["reason"].startswith("the journal cannot be written")
        refused = server.rollout(run=f"{run}-new", prompts=[prompt("b", 4)], quota=None, status=503)
        assert refused["error"]["reason"] == health.json()["error"]["reason"]
        assert not waiting.done
    (group,) = waiting.reply()["finished"]
    assert [len(sample["output_ids"]) for sample in group["samples"]] == [20, 20]
    until(lambda: server.http.get("/health").status_code == 200, "/health recovers")
    assert server.state()["http"]["journal"]["fault"] == ""


def failing(server: Server) -> httpx.Response | None:
    answer = server.http.get("/health")
    return answer if answer.status_code == 503 else None
