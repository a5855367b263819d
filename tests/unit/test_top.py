"""The terminal view: one frame, what it refuses, and how it ends."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sglang_april import PROTOCOL, top
from tests.unit.test_metrics import STATE

SHOWN: dict[str, Any] = STATE | {
    "step": 17,
    "frozen": False,
    "rounds": [{"round_id": "r-open", "run": "grpo", "counted": 3, "quota": 8, "mandatory": ["a"]}],
    "http": {
        "hooks": {"protocol": PROTOCOL},
        "last_rounds": [
            {
                "round_id": "r-last",
                "run": "evil\x1b[2J",
                "end_reason": "quota",
                "policy_version": 3,
                "groups": 8,
                "samples": 32,
                "tokens": 4096,
                "samples_by_staleness": {"0": 30, "1": 2},
                "t_ended": 0.0,
                "duration_s": 12.25,
                "mean_running": None,
            }
        ],
    },
}


@contextmanager
def serving(status: int, content: Any) -> Iterator[str]:
    class MetricsHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(content).encode()
            self.send_response(status if self.path == "/april/state" else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), MetricsHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "sglang_april.top", *args]


def test_a_frame_shows_rounds_batch_tiers_and_staleness() -> None:
    text = top.frame("http://server", SHOWN, [0, 4, 8], 120)
    for shown in (
        "policy version 4",
        "r-open",
        "grpo",
        "r-last",
        "12.2",
        "4,096",
        "0: 30  1: 2",
        " ▄█",
        "20 KV tokens",
    ):
        assert shown in text, shown
    assert "ok, 0.0 MiB, 2 batches wait, 0.5 s behind" in text
    assert "\x1b" not in text, "names of runs come from clients"
    assert all(len(line) <= 40 for line in top.frame("http://server", SHOWN, range(500), 40).splitlines())


def test_a_frame_shows_why_no_rounds_open_and_the_fault_of_the_journal() -> None:
    state = SHOWN | {
        "closed": "a push is open",
        "push_open": True,
        "journal": SHOWN["journal"] | {"fault": "disk full"},
    }
    text = top.frame("u", state, [], 200)
    assert "no rounds: a push is open" in text
    assert "journal FAULTY: disk full" in text
    assert re.search(r"agents +3 +40 +5 +2 +1\n", text)
    empty = SHOWN | {
        "attached": {},
        "trajectories": {},
        "journal": None,
        "rounds": [],
        "staleness": {},
        "http": {"last_rounds": []},
    }
    assert "journal none" in top.frame("u", empty, [], 80)
    assert "agents" not in top.frame("u", empty, [], 200)


def test_sparkline() -> None:
    assert top.sparkline([0, 1, 2, 4, 8]) == " ▁▂▄█"
    assert top.sparkline([0, 0]) == "  "
    assert top.sparkline([]) == ""


def test_once_prints_one_frame() -> None:
    with serving(200, SHOWN) as url:
        done = subprocess.run(command(url, "--once"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "r-open" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As in `… --once | head -1`."""
    with serving(200, SHOWN) as url:
        shown = subprocess.Popen(command(url, "--once"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert shown.stdout is not None
        shown.stdout.close()
        assert shown.stderr is not None
        assert (shown.wait(60), shown.stderr.read()) == (0, "")


def test_a_server_without_the_plugin_is_an_error() -> None:
    with serving(404, {"detail": "Not Found"}) as url:
        done = subprocess.run(command(url, "--once"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert url in done.stderr
    assert "sglang-april" in done.stderr


@pytest.mark.parametrize("content", ["<html>", {"samples": {}}, None])
def test_something_else_that_answers_is_an_error(content: Any) -> None:
    with serving(200, content) as url:
        done = subprocess.run(command(url, "--once"), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{url}: this is not an sglang-april server\n"


def test_a_missing_key_is_named() -> None:
    with serving(401, {"error": "Unauthorized"}) as url:
        done = subprocess.run(command(url, "--once"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{url}: the server requires its key: --api-key or APRIL_API_KEY\n")


def test_no_server_and_no_url_are_errors() -> None:
    unreachable = subprocess.run(command("http://127.0.0.1:9", "--once"), capture_output=True, text=True, check=False)
    assert unreachable.returncode == 1
    assert len(unreachable.stderr.splitlines()) == 1, unreachable.stderr
    for args in (["ftp://localhost"], ["http://localhost", "--interval=0"]):
        assert subprocess.run(command(*args), capture_output=True, check=False).returncode == 2


def test_ctrl_c_ends_with_130() -> None:
    with serving(200, SHOWN) as url:
        process = subprocess.Popen(
            command(url, "--interval=0.05"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        while "r-last" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
