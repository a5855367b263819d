"""Ctrl-C in long commands: one line, exit status 130, and no server left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITING = """
import sys, threading, time
from examples import interrupt

def command():
    threading.Thread(target=time.sleep, args=(600,)).start()
    try:
        print("started", flush=True)
        time.sleep(600)
    finally:
        print("left", flush=True)

interrupt.run(command, "two rows are kept")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_leaves_its_contexts_and_prints_one_line(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "left\n")
    assert errors.splitlines() == ["", "interrupted: two rows are kept"]


@pytest.mark.parametrize("command", ["bench.report", "examples.april_demo"])
def test_command_interrupted_during_its_imports_prints_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(600)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else the child ignores what a background shell ignores
    process = subprocess.Popen(
        [sys.executable, "-m", command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == ["", "interrupted: nothing was started"]


SHORT = {
    "bench/gpu/machine.py",
    "bench/random_checkpoint.py",
    "bench/traced_server.py",
    "examples/own_trainer.py",
    "examples/tiny_model.py",
}
"""Commands that end by themselves within seconds, SGLang's own server, and a page's example."""


def test_every_long_command_of_bench_and_examples_ends_with_one_line() -> None:
    files = [path for folder in ("bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    commands = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    missing = {name for name, text in commands.items() if '== "__main__"' in text and "interrupt.run(" not in text}
    assert missing == SHORT


def test_demo_interrupted_while_its_server_starts_leaves_no_process(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.april_demo", "--out", str(tmp_path), "--steps", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SGLANG_APRIL_CPU": "1"},
    )
    children: list[psutil.Process] = []
    while not children:
        assert process.poll() is None
        children = [
            p for p in psutil.Process(process.pid).children(recursive=True) if "launch_server" in str(p.cmdline())
        ]
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("interrupted: the servers have exited")
    assert not any(child.is_running() for child in children)


SLOW_READ = """
import pathlib, sys, time
from trainer_bridge import __main__ as commands

glob = pathlib.Path.glob

def slow(self, pattern):
    print("started", flush=True)
    time.sleep(600)

pathlib.Path.glob = pathlib.Path.exists = slow
sys.exit(getattr(commands, sys.argv.pop(1))())
"""


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["convert", "run"], "april-convert: interrupted; the output folder is incomplete; the same command writes it"),
        (["main", "report", "run"], "april-train: interrupted; nothing was changed"),
    ],
)
def test_interrupted_convert_and_report_print_one_line(command: list[str], line: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SLOW_READ, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert [written for written in errors.splitlines() if written][-1].startswith(line)
    assert "Traceback" not in errors
