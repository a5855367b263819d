"""Packages of other projects for tests: unpacked into a folder of their own and never installed beside this project."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.live import LiveServer
from tests.support.server import ROOT


def unpacked(requirements: list[str], folder: Path) -> Path:
    """A folder with these packages, and none that they depend on. Without a registry the test is skipped."""
    path = folder / hashlib.sha256(json.dumps(requirements).encode()).hexdigest()[:16]
    if not (path / "complete").exists():
        shutil.rmtree(path, ignore_errors=True)  # of an attempt that was interrupted
        pip("install", "--target", str(path), *requirements)
        if (path / "tests").exists():
            (path / "tests").rename(path / "package_tests")  # it would hide this repository's tests
        (path / "complete").touch()
    return path


def pip(*arguments: str) -> None:
    """Run pip without dependencies. Where it fails, as without a registry, the test is skipped."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip {' '.join(arguments)}: {done.stderr.strip()[-300:]}")


def run_cases(files: Sequence[str], packages: Path, live: LiveServer, *, env: dict[str, str] | None = None) -> None:
    """Run the tests of files in `tests/frameworks` in a process that has these packages, against a live server.

    A process of its own, because such packages change what is imported: loggers, start methods, other versions.
    """
    server = {
        "port": live.server.port,
        "folder": str(live.server.folder),
        "models": [str(live.model(s)) for s in (0, 1)],
    }
    described = {"APRIL_TEST_SERVER": json.dumps(server), "APRIL_TEST_PACKAGES": str(packages), **(env or {})}
    _pytest(["-x", *(f"{ROOT}/tests/frameworks/{name}" for name in files)], packages, cwd=ROOT, env=described)


def run_own_tests(distribution: str, matching: str, packages: Path, folder: Path, *, env: dict[str, str]) -> None:
    """Run tests that a package's wheel contains, those whose path matches, in a process that has these packages.

    Args:
        folder: empty; the tests run in it, and a `conftest.py` in it is theirs.
    """
    (found,) = metadata.distributions(name=distribution, path=[str(packages)])
    files = sorted(str(file) for file in found.files or () if re.fullmatch(matching, str(file)))
    assert files, f"{distribution} contains no test that matches {matching}"
    # As in a checkout: they import each other as `tests`, and open files of their package by relative paths.
    (folder / "tests").symlink_to(packages / "package_tests")
    (folder / distribution).symlink_to(packages / distribution)
    _pytest(["-c", os.devnull, f"--rootdir={folder}", "-W", "ignore", *files], packages, cwd=folder, env=env)


def _pytest(arguments: Sequence[str], packages: Path, *, cwd: Path, env: dict[str, str]) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", packages))),
        **env,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
