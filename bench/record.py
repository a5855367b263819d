"""The provenance of benchmark rows, and the files that hold them.

A file under ``bench/results`` is a JSON list of rows; runs only append to it.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "triton", "sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python")
Row = dict[str, Any]


def provenance() -> Row:
    """`machine`, `versions`, `commit`, `time` and `load` (the current 1-minute load average)."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit hash, with ``+changes`` if the tree is modified; empty outside of a repository."""
    head = _output("git", "rev-parse", "HEAD")
    # New rows do not change the measured code.
    return head + ("+changes" if head and _output("git", "status", "--porcelain", "--", ":!bench/results") else "")


def machine() -> Row:
    """The processor, its cores, and the first GPU (None without one)."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "os": platform.system(), "gpu": gpu_name()}


def gpu_name() -> str | None:
    """The name of the first CUDA or ROCm GPU; None without one."""
    if named := _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"):
        return named.splitlines()[0].strip()
    if not _output("rocminfo"):
        return None
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def versions() -> Row:
    """Versions of Python and of the packages; None for those not installed."""
    found: Row = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu_name() -> str:
    """The name of the processor, else its architecture."""
    info = Path("/proc/cpuinfo")
    names = [text for text in info.read_text().splitlines() if text.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def append_rows(path: Path, rows: list[Row]) -> None:
    """Append rows to the list in `path` atomically, also beside other processes that append to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with _locked(path.parent):
        new.write_text("[\n" + ",\n".join(json.dumps(row) for row in [*read_rows(path), *rows]) + "\n]\n")
        new.replace(path)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder: that of a file in it would go with the file that is replaced."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; empty if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else []


def newest_run(rows: list[Row], key: str = "run_id", case: Callable[[Row], object] = lambda _: None) -> list[Row]:
    """The rows of the newest run: those that agree in `key` with the newest one.

    With `case`, it is the newest of the runs with the most cases: one that was interrupted lacks some.
    """
    runs: dict[object, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.get(key), []).append(row)
    return max(runs.values(), key=lambda run: (len(set(map(case, run))), max(row["time"] for row in run)), default=[])


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
