"""The processes of servers that a run starts: their ports, records, logs and ends."""

import json
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.live import until
from trainer_bridge import server_process
from trainer_bridge.server_process import LocalServerProcess, free_port, last_error, termination_timeout_s


def test_a_port_in_use_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_process, "PORTS", [port])
        with pytest.raises(OSError, match="are in use"):
            free_port()
    assert free_port() == port


def test_a_port_at_an_address_of_another_machine() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")


SLOW_TO_END = """
import signal, sys, time

def end(*_):
    time.sleep(4)  # longer than a server without anything to store gets
    open(sys.argv[2], "w").write("stored")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stores", [True, False])
def test_server_that_stores_kv_is_given_its_time(tmp_path: Path, stores: bool) -> None:
    process = LocalServerProcess(tmp_path / "server.json")
    stored, log = tmp_path / "stored", tmp_path / "log"
    flags = ["--april-journal=/j", "--april-disk-dir=/d", "--april-disk-gb", "1"] if stores else ["--april-journal=/j"]
    process.start([sys.executable, "-c", SLOW_TO_END, "--port=1", str(stored), *flags], "http://x", log)
    until(lambda: "up" in log.read_text(), "the start of the server")
    process.end()
    assert stored.exists() == stores
    assert not process.alive


@pytest.mark.parametrize(
    ("flags", "seconds"),
    [
        ([], 3),
        (["--april-journal", "/j", "--april-shutdown-s", "600"], 3),
        (["--april-journal=/j", "--april-disk-dir=/d", "--april-disk-gb=1"], 33),
        (["--april-journal=/j", "--april-disk-dir=/d", "--april-disk-gb=1", "--april-shutdown-s", "600"], 603),
        (["--april-journal=/j", "--april-disk-dir=/d", "--april-shutdown-s=soon"], 3),
    ],
)
def test_time_between_sigterm_and_sigkill(flags: list[str], seconds: float) -> None:
    assert termination_timeout_s(["python", "-m", "sglang_april.launch_server", "--tp", "2", *flags]) == seconds


def test_a_server_is_recognized_after_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = LocalServerProcess(tmp_path / "server.json")
    started.start([sys.executable, "-c", "import time; time.sleep(60)"], "http://127.0.0.1:1", tmp_path / "log")
    boot = psutil.boot_time()
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: boot + 1.0)
    assert LocalServerProcess(tmp_path / "server.json").url == "http://127.0.0.1:1"
    monkeypatch.undo()
    started.end()


def test_reused_pid_is_not_taken_for_the_server(tmp_path: Path) -> None:
    record = {"pid": os.getpid(), "began": "another boot", "url": "http://127.0.0.1:1"}
    (tmp_path / "server.json").write_text(json.dumps(record))
    process = LocalServerProcess(tmp_path / "server.json")
    assert process.url is None
    assert not process.alive
    process.end()


def test_only_errors_of_the_last_start_are_reported(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("ValueError: an earlier one\n")
    start = log.stat().st_size
    assert last_error(log, start) == ""
    with log.open("a") as out:
        out.write("loading\nsglang-april: --pp-size is refused.\n\nKilled\n")
    assert last_error(log, start) == "sglang-april: --pp-size is refused."
    with log.open("a") as out:
        end = out.tell()
        out.write(
            "[2026-11-25 04:11:30] Load weight begin.\nx.py:7: UserWarning: slow\n  warnings.warn(\nW1125 04:1 none\n"
        )
    assert last_error(log, end) == "[2026-11-25 04:11:30] Load weight begin."
    assert last_error(tmp_path / "none.log") == ""
