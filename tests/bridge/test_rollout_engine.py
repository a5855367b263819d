"""Engines of a run: servers that are started, found again by the next trainer, restarted after a crash."""

import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.live import until
from trainer_bridge.config import Config
from trainer_bridge.rollout_engine import RolloutEngine, RolloutEngines
from trainer_bridge.server_process import (
    EngineGoneError,
    EngineLostError,
    ServerStartError,
)

HTTP_SERVER = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def engine(folder: Path, code: str = HTTP_SERVER, **fields: object) -> RolloutEngine:
    """An engine whose server is a short Python script."""
    rollout_engine = RolloutEngine(Config(hf_checkpoint="m", prompt_data="d", **fields), folder)  # type: ignore[arg-type]
    port = rollout_engine.url.rpartition(":")[2]
    rollout_engine._command = lambda: [sys.executable, "-c", code, port]  # type: ignore[method-assign]
    return rollout_engine


def pid(folder: Path) -> int:
    return int(json.loads((folder / "server.json").read_text())["pid"])


def test_next_trainer_takes_over_the_running_server(tmp_path: Path) -> None:
    first = engine(tmp_path)
    first.wait_until_ready()
    server = pid(tmp_path)
    second = engine(tmp_path)  # the first trainer was killed and stopped nothing
    second.wait_until_ready()
    assert (second.url, pid(tmp_path)) == (first.url, server)
    second.close()
    assert first.process is not None
    assert not first.process.alive
    assert not (tmp_path / "server.json").exists()


def test_killed_server_is_restarted_at_its_address(tmp_path: Path) -> None:
    rollout_engine = engine(tmp_path)
    rollout_engine.wait_until_ready()
    server = pid(tmp_path)
    os.killpg(server, signal.SIGKILL)
    process = rollout_engine.process
    assert process is not None
    until(lambda: not process.alive, "the end of the server")
    rollout_engine.wait_until_ready()
    assert pid(tmp_path) != server
    rollout_engine.close()


def test_restart_that_fails_is_reported_as_a_lost_engine(tmp_path: Path) -> None:
    rollout_engine = engine(tmp_path, "raise SystemExit(3)")
    rollout_engine._was_ready = True
    with pytest.raises(EngineLostError, match=r"server\.log"):
        rollout_engine.wait_until_ready()
    rollout_engine.close()


def test_external_server_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    config = Config(hf_checkpoint="m", prompt_data="d", server="http://127.0.0.1:9", server_start_timeout=0.01)
    rollout_engine = RolloutEngines(config, tmp_path)
    with pytest.raises(EngineGoneError, match=r"127\.0\.0\.1:9 became ready within 0.01 s"):
        rollout_engine.wait_until_ready()
    rollout_engine.close()


def test_started_server_has_a_journal_by_default(tmp_path: Path) -> None:
    def journal_flags(**fields: object) -> list[str]:
        rollout_engine = RolloutEngine(Config(hf_checkpoint="m", prompt_data="d", **fields), tmp_path)  # type: ignore[arg-type]
        return [flag for flag in rollout_engine._command() if "journal" in flag]

    assert journal_flags() == [f"--april-journal={tmp_path / 'server.journal'}"]
    assert journal_flags(server_flags=["--april-journal=/x"]) == ["--april-journal=/x"]
    sync = "--april-journal-sync=full"
    assert journal_flags(server_flags=[sync]) == [sync, f"--april-journal={tmp_path / 'server.journal'}"]
    assert journal_flags(server_journal=False) == []


@pytest.mark.parametrize("gpus", [False, True])
def test_a_server_that_shares_the_trainers_gpu_can_release_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: bool
) -> None:
    """Without the flag, SGLang answers the release and keeps the memory."""
    monkeypatch.setattr("trainer_bridge.rollout_engine.uses_gpus", lambda _device: gpus)

    def flags(**fields: object) -> int:
        config = Config(hf_checkpoint="m", prompt_data="d", **fields)  # type: ignore[arg-type]
        return RolloutEngine(config, tmp_path)._command().count("--enable-memory-saver")

    assert flags() == 0
    assert flags(colocate=True) == gpus
    assert flags(colocate=True, server_flags=["--enable-memory-saver"]) == 1


def test_several_servers_share_the_memory_of_their_machine(tmp_path: Path) -> None:
    """A flag of the user's comes later and wins."""

    def shares(**fields: object) -> list[str]:
        rollout_engine = RolloutEngine(Config(hf_checkpoint="m", prompt_data="d", **fields), tmp_path)  # type: ignore[arg-type]
        return [flag.rpartition("=")[2] for flag in rollout_engine._command() if "servers-per-machine" in flag]

    assert shares() == []
    assert shares(engines=4) == ["4"]
    assert shares(engines=4, server_flags=["--april-servers-per-machine=2"]) == ["4", "2"]


def test_first_start_that_fails_ends_with_the_servers_error(tmp_path: Path) -> None:
    notes: list[str] = []
    code = "import sys; print('loading'); sys.stdout.flush(); raise ValueError('no decoder')"
    rollout_engine = engine(tmp_path, code)
    rollout_engine._note = notes.append
    with pytest.raises(ServerStartError, match=r"did not start: ValueError: no decoder \(log: .*server\.log\)"):
        rollout_engine.wait_until_ready()
    assert len(notes) == 1
    assert "starting a server" in notes[0]
    rollout_engine.close()


def test_progress_is_reported_while_a_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_bridge.rollout_engine.NOTE_S", 0.0)
    notes: list[str] = []
    rollout_engine = engine(tmp_path, "import time; print('loading weights', flush=True); time.sleep(600)")
    rollout_engine._note = notes.append
    with ThreadPoolExecutor(1) as threads:
        ready = threads.submit(rollout_engine.wait_until_ready)
        until(lambda: any("loading weights" in note for note in notes), "a line of the log")
        rollout_engine.end_server()
        assert isinstance(ready.exception(), EngineGoneError | EngineLostError)
    assert not rollout_engine.process.alive  # type: ignore[union-attr]


class SlowToStart:
    """A server process whose start takes until `may_start`."""

    def __init__(self) -> None:
        self.began, self.may_start, self.alive = threading.Event(), threading.Event(), False

    def start(self, *_: object) -> None:
        self.began.set()
        assert self.may_start.wait(60)
        self.alive = True

    def end(self) -> None:
        self.alive = False


def test_server_that_is_being_started_is_ended_too(tmp_path: Path) -> None:
    rollout_engine, process = engine(tmp_path), SlowToStart()
    rollout_engine.process = process  # type: ignore[assignment]
    with ThreadPoolExecutor(2) as threads:
        ready = threads.submit(rollout_engine.wait_until_ready)
        assert process.began.wait(60)
        ended = threads.submit(rollout_engine.end_server)
        until(rollout_engine._ended.is_set, "Ctrl-C")
        threading.Timer(0.2, process.may_start.set).start()
        ended.result(60)
        assert isinstance(ready.exception(60), EngineGoneError | EngineLostError | ServerStartError)
    assert not process.alive


def test_server_whose_start_takes_long_is_ended_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ray, it may wait minutes for a place in the cluster."""
    monkeypatch.setattr("trainer_bridge.rollout_engine.START_TIMEOUT_S", 0.1)
    rollout_engine, process = engine(tmp_path), SlowToStart()
    rollout_engine.process = process  # type: ignore[assignment]
    process.end = process.may_start.set  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        ready = threads.submit(rollout_engine.wait_until_ready)
        assert process.began.wait(60)
        try:
            threads.submit(rollout_engine.end_server).result(30)
        finally:
            process.may_start.set()
        assert isinstance(ready.exception(60), EngineGoneError)
    rollout_engine.end_server()


def test_no_server_is_started_after_the_end(tmp_path: Path) -> None:
    rollout_engine, process = engine(tmp_path), SlowToStart()
    rollout_engine.process = process  # type: ignore[assignment]
    process.may_start.set()
    rollout_engine.end_server()
    with pytest.raises(EngineGoneError):
        rollout_engine.wait_until_ready()
    assert not process.began.is_set()
