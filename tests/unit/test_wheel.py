"""The wheel: what it contains, and the client on a machine without SGLang and torch."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENT = """
import importlib.util
from sglang_april.client import AprilClient, AsyncAprilClient, ServerLostError
assert importlib.util.find_spec("sglang") is None and importlib.util.find_spec("torch") is None
try:
    AprilClient("http://127.0.0.1:9").state()
except ServerLostError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack modules of earlier builds
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_has_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    packages = {ROOT / "sglang_april": "", ROOT / "trainer_bridge": "", ROOT / "kernels" / "april_kernels": "kernels/"}
    expected = set()
    for package, prefix in packages.items():
        files = [path for pattern in ("*.py", "*.json", "*.html", "py.typed") for path in package.rglob(pattern)]
        expected |= {str(path.relative_to(ROOT)).removeprefix(prefix) for path in files}
    contained = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert contained == expected


def test_client_runs_without_sglang_and_torch(wheel: Path, tmp_path: Path) -> None:
    """An environment of its own, with base dependencies; other commands name the extra that they need."""
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    uv = Path(sys.executable).with_name("uv")
    for command in (
        [uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"],
        [uv, "pip", "install", "--quiet", "--python", python, wheel],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    done = subprocess.run(
        [python, "-c", CLIENT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no answer to GET /april/state" in done.stdout
    for words, extra in (
        (["python", "-m", "sglang_april.launch_server", "--april-quota", "1"], "engine"),
        (["april-train", "--help"], "trainer"),
        (["april-convert", "run"], "trainer"),
    ):
        command = [python.with_name(words[0]), *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode, words
        assert done.stderr.count("\n") == 1
        release = " sglang==0.5.17" if extra == "engine" else ""
        assert done.stderr.rstrip(".\n").endswith(f"pip install 'sglang-april[{extra}]'{release} installs it")
