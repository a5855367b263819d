"""What README, CONTRIBUTING, the quickstart and the recipes tell a reader to do, where no test can do it."""

import os
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.support.pages import ROOT, blocks, commands

QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()


def test_servers_of_the_quickstart_serve_the_checkpoint_of_its_round() -> None:
    """Prompts and the pushed checkpoint are those of the sorting model, which default backends of GPUs cannot run."""
    found = [words for block in blocks("bash") if block.page == "docs/quickstart.md" for words in commands(block.text)]
    cpu, gpu = (words for words in found if "sglang_april.launch_server" in words)
    for server in (cpu, gpu):
        assert server[server.index("--model-path") + 1] == "examples/checkpoints/v0"
    assert "--attention-backend triton --sampling-backend pytorch" in " ".join(gpu)


def test_training_of_the_quickstart_on_gpus_uses_backends_that_run_its_model() -> None:
    on_gpus = QUICKSTART.partition("On GPUs leave out")[2].partition("## Next")[0]
    settings = yaml.safe_load(on_gpus.partition("`server_flags: ")[2].partition("`")[0])
    assert settings == ["--attention-backend=triton", "--sampling-backend=pytorch"]
    assert "colocate: true" in on_gpus
    assert "enable-memory-saver" not in on_gpus, "the bridge adds it"


@pytest.mark.parametrize("target", ["test", "live"])
def test_make_hides_gpus_from_the_tests(tmp_path: Path, target: str) -> None:
    """On a GPU, live tests would run with its default backends, two workers on one device. On ROCm, torch ignores
    CUDA_VISIBLE_DEVICES beside either of the other two, and ROCR's beside HIP's."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "pytest").write_text('#!/bin/sh\necho "visible: [$CUDA_VISIBLE_DEVICES] [${HIP_VISIBLE_DEVICES-unset}]"\n')
    (bin_ / "pytest").chmod(0o755)
    (tmp_path / ".ready").touch()
    command = ["make", target, f"VENV={tmp_path}"]
    given = {f"{name}_VISIBLE_DEVICES": "0,1" for name in ("CUDA", "HIP", "ROCR")}
    environment = {**os.environ, **given}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "visible: [] []" in done.stdout


def test_an_image_holds_no_environment_output_or_history() -> None:
    """`COPY . .` takes all that `.dockerignore` does not name; `.gitignore` lists what a checkout creates."""
    left_out = (ROOT / ".dockerignore").read_text().replace("**/", "").split()
    for created in (".git", *(ROOT / ".gitignore").read_text().split()):
        assert any(fnmatch(created.rstrip("/"), pattern) for pattern in left_out), created
    (dockerfile,) = re.findall(r"docker build -f (\S+) \. ", (ROOT / "docker" / "README.md").read_text())
    assert (ROOT / dockerfile).exists()


def test_every_file_with_a_skipped_test_is_named() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## Skipped tests")[2].partition("\n## ")[0]
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.skipif(" in path.read_text()]
    assert len(files) > 2
    assert [path.name for path in files if path.name not in page and path.name != Path(__file__).name] == []
