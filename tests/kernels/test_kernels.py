"""Runs the kernels' cases (cases_*.py) against their references: in Triton's interpreter, and on a GPU if there is one.

Whether a kernel is interpreted or compiled is settled when it is defined, so each way has processes of its own.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in HERE.glob("cases_*.py"))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

Started = dict[str, tuple[subprocess.Popen[bytes], Path]]
"""Cases → their process and its output."""


def _start(cases: str, interpret: str, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    # One thread: the interpreter works on small arrays, and the processes would wait for each other's threads.
    env = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        str(HERE / f"{cases}.py"),
    ]
    output = folder / f"{cases}.txt"
    with output.open("wb") as file:
        return subprocess.Popen(command, cwd=HERE.parents[1], env=env, stdout=file, stderr=subprocess.STDOUT), output


@pytest.fixture(scope="module", params=["interpreter", pytest.param("gpu", marks=needs_gpu)])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """All cases at once in the interpreter, which keeps one core busy each; one after another on the GPU."""
    folder, interpret = tmp_path_factory.mktemp(request.param), "1" if request.param == "interpreter" else "0"
    processes: Started = {}
    for cases in CASES:
        processes[cases] = _start(cases, interpret, folder)
        if request.param == "gpu":
            processes[cases][0].wait()
    yield processes
    for process, _ in processes.values():
        process.kill()


@pytest.mark.parametrize("cases", CASES)
def test_cases(cases: str, started: Started) -> None:
    process, output = started[cases]
    status = process.wait()
    text = output.read_text()
    assert status == 0, text[-8000:]
    assert " passed" in text
    assert " skipped" not in text or "gpu" in output.parent.name
