"""What README, CONTRIBUTING, the quickstart and the recipes tell a reader to do, where no test can do it."""

import ast
import os
import re
import subprocess
import sys
import tomllib
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


def test_every_openai_client_of_the_docs_waits_for_a_push_and_sends_once() -> None:
    """The package's defaults end a request after ten minutes and send it again, which begins another leg."""
    clients = [
        (block.name, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords})
        for language in ("python", "text")
        for block in blocks(language)
        if "OpenAI(" in block.text
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("OpenAI")
    ]
    assert len(clients) == 4
    for name, given in clients:
        assert (given.get("timeout"), given.get("max_retries")) == ("None", "0"), name


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


@pytest.mark.parametrize(
    ("version", "system", "refused"),
    [
        ((3, 10), "Linux", "Python 3.11 or 3.12 is needed, not 3.10"),
        ((3, 11), "Linux", None),
        ((3, 12), "Linux", None),
        ((3, 13), "Linux", "Python 3.11 or 3.12 is needed, not 3.13"),
        ((3, 12), "Darwin", "Linux is needed: SGLang has no packages for Darwin"),
    ],
)
def test_make_refuses_where_sglang_cannot_be_installed(
    tmp_path: Path, version: tuple[int, int], system: str, refused: str | None
) -> None:
    """A requirement of SGLang has wheels up to Python 3.12: pip would compile it, which needs Rust."""
    python = f'[ "$1" = -c ] || exit 1\nexec {sys.executable} -c "import sys; sys.version_info = {version}; $2"\n'
    for name, script in (("python", python), ("uname", f"echo {system}\n")):
        (tmp_path / name).write_text("#!/bin/sh\n" + script)
        (tmp_path / name).chmod(0o755)
    ready = tmp_path / "venv" / ".ready"
    command = ["make", str(ready), f"VENV={ready.parent}", f"PYTHON={tmp_path / 'python'}"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0, "this Python creates no environment"
    assert ("setting up" in done.stdout) == (refused is None)
    assert (refused or "") in done.stdout + done.stderr


def test_a_server_in_an_environment_with_sglang_needs_what_the_page_lists() -> None:
    """Its installation without dependencies must lack nothing; numba is for the CPU platform alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[>=!]", one)[0] for one in project["dependencies"] + project["optional-dependencies"]["engine"]}
    page = (ROOT / "docs" / "sglang-versions.md").read_text().replace("\n", " ")
    (listed,) = re.findall(r"What it needs \((.*?)\) is there with SGLang", page)
    assert set(listed.split(", ")) == needed - {"sglang", "numba"}
    paths = [path for folder in ("sglang_april", "kernels") for path in (ROOT / folder).rglob("*.py")]
    compiled = [path for path in paths if re.search("import numba|april_kernels.compiled", path.read_text())]
    own = {"kernels/april_kernels/compiled.py", "kernels/april_kernels/seeded_sampling/cpu.py"}
    others = {str(path.relative_to(ROOT)) for path in compiled} - own
    assert others
    assert all(path.startswith("sglang_april/cpu/") for path in others), others


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
