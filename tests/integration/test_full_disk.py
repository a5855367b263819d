"""A journal on a full disk: nothing new is accepted, `/health` gives the reason, and what waits is answered later."""

import contextlib
import json
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_april.client import AprilClient
from tests.integration.conftest import NORMAL, Pool
from tests.support.live import until
from tests.support.server import Server
from tests.support.workload import prompt


@pytest.fixture
def journalled(pool: Pool, tmp_path: Path) -> Iterator[Server]:
    """A server with an empty journal that no other test shares."""
    server = pool.get("full disk", [*NORMAL, f"--april-journal={tmp_path / 'journal'}"], forked=True)
    yield server
    server.stop()


def limit(server: Server, size: int) -> None:
    """No file of the scheduler can grow beyond this size."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    (scheduler,) = [child for child in children if "sglang::scheduler" in child.name() + " ".join(child.cmdline())]
    scheduler.rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def no_space(server: Server, journal: Path) -> Iterator[None]:
    """No file of the scheduler can grow beyond the journal's present size."""
    limit(server, journal.stat().st_size)
    try:
        yield
    finally:
        limit(server, resource.RLIM_INFINITY)


def test_health_reports_a_full_disk_and_nothing_is_lost(
    journalled: Server, tmp_path: Path, run: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = journalled
    large = prompt("large", 4, metadata="m" * 2**20)  # the journal becomes the largest file
    server.rollout(run=f"{run}-before", prompts=[large], quota=None)
    assert server.http.get("/health").status_code == 200
    body = {"run": run, "round_id": f"{run}-waits", "prompts": [prompt("a", 20, n=2)], "quota": None}
    with no_space(server, tmp_path / "journal-wal"), ThreadPoolExecutor(1) as threads, AprilClient(server.url) as april:
        waiting = threads.submit(april.rollout, **body)
        health = until(lambda: failing(server), "/health reports the fault")
        assert health.json()["error"]["reason"].startswith("the journal cannot be written")
        refused = server.rollout(run=f"{run}-new", prompts=[prompt("b", 4)], quota=None, status=503)
        assert refused["error"]["reason"] == health.json()["error"]["reason"]
        answer = server.http.post("/april/rollout", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["field"]) == (503, "journal")
        assert answer.json()["error"]["reason"].startswith("the journal cannot be written")
        assert f"round {run}-waits waits for it" in answer.json()["error"]["reason"]
        until(lambda: "still waiting: the journal cannot be written" in caplog.text, "the client logs the reason")
        assert not waiting.done()
        limit(server, resource.RLIM_INFINITY)
        (group,) = waiting.result(60).finished
    assert [len(sample.output_ids) for sample in group.samples] == [20, 20]
    until(lambda: server.http.get("/health").status_code == 200, "/health recovers")
    assert server.state()["http"]["journal"]["fault"] == ""


def test_open_stream_reports_a_full_disk_and_continues(journalled: Server, tmp_path: Path, run: str) -> None:
    server = journalled
    server.rollout(run=f"{run}-before", prompts=[prompt("large", 4, metadata="m" * 2**20)], quota=None)
    body = {"run": run, "stream": True, "previews": True, "prompts": [prompt("a", 4), prompt("b", 300)], "quota": None}
    with httpx.stream("POST", f"{server.url}/april/rollout", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines))["id"] == "a"
        with no_space(server, tmp_path / "journal-wal"):
            waiting = json.loads(next(lines))
            assert waiting["event"] == "waiting"
            assert waiting["reason"].startswith("the journal cannot be written")
        rest = [event for line in lines if (event := json.loads(line))["event"] != "waiting"]
    assert [(event["event"], event.get("id")) for event in rest[:1]] == [("group", "b")]
    assert [entry["id"] for entry in rest[-1]["delivered"]] == ["a", "b"]


def test_sigterm_on_a_full_disk_names_what_is_lost(pool: Pool, tmp_path: Path, run: str) -> None:
    journal = tmp_path / "journal"
    server = pool.get("full disk", [*NORMAL, f"--april-journal={journal}", "--april-shutdown-s=20"], forked=True)
    assert server.process is not None
    server.rollout(run=f"{run}-before", prompts=[prompt("large", 4, metadata="m" * 2**20)], quota=None)
    limit(server, (tmp_path / "journal-wal").stat().st_size)
    body = {"run": run, "prompts": [prompt("a", 4)], "quota": None}
    with ThreadPoolExecutor(1) as threads:
        threads.submit(httpx.post, f"{server.url}/april/rollout", json=body, timeout=60)
        until(lambda: failing(server), "/health reports the fault")
        server.terminate()
    log = server.log.read_text()
    assert "batches of records are lost" in log, log[-2000:]
    assert "shut down in" in log


def failing(server: Server) -> httpx.Response | None:
    answer = server.http.get("/health")
    return answer if answer.status_code == 503 else None
