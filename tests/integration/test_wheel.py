"""An installed wheel, without a checkout: its server starts and runs a round."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from examples.tiny_model import make
from sglang_april.client import AprilClient, ServerLostError
from tests.support.server import START_LIMIT_S
from trainer_bridge.server_process import free_port

ROOT = Path(__file__).parents[2]
OURS = ("sglang_april", "april_kernels", "trainer_bridge", "__editable__")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel, in which all other packages are links to those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (packages,) = (folder / "env").glob("lib/python3*/site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not path.name.startswith(OURS):
            (packages / path.name).symlink_to(path)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([*install, str(wheel)], check=True)
    return folder / "env" / "bin" / "python"


def test_server_of_an_installed_wheel_runs_a_round(python: Path, tmp_path: Path) -> None:
    model, port, log = make(tmp_path / "model"), free_port(), tmp_path / "server.log"
    flags = ["--model-path", str(model), "--april-quota", "1", "--mem-fraction-static", "0.6", "--port", str(port)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-m", "sglang_april.launch_server", *flags]
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        with AprilClient(f"http://localhost:{port}") as april:
            deadline = time.monotonic() + START_LIMIT_S
            while True:
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                try:
                    hooks = april.state()["http"]["hooks"]
                    break
                except ServerLostError:
                    time.sleep(0.5)
            reply = april.rollout(run="wheel", prompts=[{"id": "a", "input_ids": [1, 2], "n": 1}], quota=1)
        assert hooks["hooks"]
        assert len(reply.finished) == 1
    finally:
        process.terminate()
        process.wait(60)
