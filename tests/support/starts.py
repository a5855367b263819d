"""Starts of a server without sglang-april's launcher, and what they share."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300
SMALL = ["--mem-fraction-static", "0.6", "--max-total-tokens", "4096"]
QUOTA = ["--april-quota", "4"]
IN_ENVIRONMENT = {"SGLANG_APRIL": '{"quota": 4}'}
SGLANG_LAUNCHER = "sglang.launch_server"


@contextmanager
def serving(command: list[str], port: str, log: Path, env: dict[str, str]) -> Iterator[str]:
    """The URL of a server that Python starts with these arguments, in a process group that is killed at the end."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server is healthy; fail with the end of its log if it ends first."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-2000:])


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without settings of the plugin, and with those given."""
    actual = ("SGLANG_APRIL", "SGLANG_APRIL_CPU", "SGLANG_PLUGINS", "SGLANG_PLATFORM")
    return {name: value for name, value in os.environ.items() if name not in actual} | extra
