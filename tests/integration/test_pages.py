"""The code of README.md and docs/ works as it is written there.

Blocks in STORY run on a server that the quickstart's own command has started; only the port differs. The commands of
all other blocks are checked: program, flags, files and extras exist.
"""

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_april import config
from tests.support.pages import ROOT, CodeBlock, block, blocks, check_command, commands
from tests.support.server import START_LIMIT_S
from trainer_bridge.server_process import free_port

QUICKSTART, README = "docs/quickstart.md", "README.md"
STORY = {
    *((QUICKSTART, number) for number in (2, 4, 5, 6, 7)),
    *((README, number) for number in (3, 5)),
    ("docs/rounds.md", 2),
    ("docs/attached-requests.md", 0),
    ("docs/integrations/own.md", 1),
    ("docs/integrations/own.md", 3),
}
COMPILED = {("docs/trainer-internals.md", 0), ("docs/training.md", 1)}
"""Need a trainer of their own; tests/integration/test_bridge_push.py and test_agent_training.py run such code."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current directory of a reader: a clone in which nothing has been written."""
    path = tmp_path_factory.mktemp("reader")
    for name in ("examples", "recipes"):
        (path / name).symlink_to(ROOT / name)
    return path


def bash(text: str, folder: Path, **popen: Any) -> "subprocess.Popen[str]":
    """Start a block as a script that ends at the first failing command."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    return subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", text], cwd=folder, env=env, text=True, start_new_session=True, **popen
    )


def output(text: str, folder: Path) -> str:
    with bash(text, folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0, printed[-3000:]
    return str(printed)


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """The port of the server that the quickstart's command has started."""
    number = free_port()
    text = block(QUICKSTART, 2).replace("30000", str(number))
    with (folder / "server.log").open("w") as log:
        process = bash("exec " + text, folder, stdout=log, stderr=subprocess.STDOUT)

    def answers() -> bool:
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        try:
            return httpx.get(f"http://localhost:{number}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    deadline = time.monotonic() + START_LIMIT_S
    try:
        while not answers():
            assert time.monotonic() < deadline, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield number
    finally:
        process.terminate()
        process.wait(60)


def test_quickstart(port: int, folder: Path) -> None:
    """A round, a push and a training run with a custom reward."""
    reply = output(block(QUICKSTART, 4).replace("30000", str(port)), folder)
    assert '"end_reason":"quota"' in reply
    spans = output(f"python - <<'PY'\n{block(QUICKSTART, 5).replace('30000', str(port))}\nPY", folder)
    carried = re.search(r"\((\d+), 'fresh'\), \((\d+), 'kept'\)", spans)
    assert carried, "the carried group"
    assert int(carried[2]) == int(carried[1]) + 1, "one push, from version 0 where the server is new"
    numbers = [int(word) for word in spans.splitlines()[0].partition("[")[0].split()]
    assert numbers == sorted(set(numbers)), "the page says that the lines are lists in order"
    assert len(numbers) > 20
    output(block(QUICKSTART, 6), folder)
    printed = output(block(QUICKSTART, 7), folder)
    assert list((folder / "out/quickstart/run").rglob("*.safetensors")), printed[-2000:]


def test_training_commands(folder: Path) -> None:
    """What the page on training shows for a configuration of one's own, with the quickstart's; nothing is trained."""
    output(block(QUICKSTART, 6), folder)
    output(block(QUICKSTART, 7).partition("\napril-train")[0], folder)
    for number in (0, 2, 3):
        mine = block("docs/training.md", number).replace("my.yaml", "out/quickstart/config.yaml")
        for line in re.findall("^april-train --config out.*?(?=  +#|$)", mine, re.MULTILINE):
            printed = output(f"{line} --dry-run", folder)
            assert "per optimiser step" in printed, line


def test_live_view(port: int, folder: Path) -> None:
    text = block("docs/observability/README.md", 0).replace("30000", str(port))
    assert "--once" in text
    assert "policy version" in output(text.replace("  #", " --once  #", 1), folder)


def test_readme(port: int, folder: Path) -> None:
    """One request by curl; one from Python, with a push. Its first server command differs by the port alone."""
    assert '"finished":' in output(block(README, 3).replace("30000", str(port)), folder)
    given = {"prompts": [{"id": f"q{i}", "text": "<bos> 2 1 <sort>", "n": 1} for i in range(40)], "updated": []}
    execute(README, 5, port, {**given, "update_weights": lambda: given["updated"].append(True)})
    assert given["updated"]
    assert commands(block(README, 2)) == [commands(block(QUICKSTART, 2))[0][:-2]]


def test_rounds(port: int) -> None:
    """The judge loop accepts groups until the quota is met, and trains once, on the groups that count."""
    from sglang_april.client import AprilClient

    trained: list[Any] = []
    prompts = [{"id": f"j{i}", "text": "<bos> 2 1 <sort>", "n": 2} for i in range(80)]
    rewards = iter([0.0, 0.5] * 40)
    with AprilClient(f"http://localhost:{port}") as april:
        given = {"april": april, "prompts": prompts, "train": trained.append}
        execute("docs/rounds.md", 2, port, {**given, "mean_reward": lambda _: next(rewards)})
    assert [len([g for g in groups if g.accepted]) for groups in trained] == [32]


def test_attached_requests(port: int) -> None:
    names = execute("docs/attached-requests.md", 0, port, {})
    assert names["reply"].choices[0].finish_reason in ("stop", "length")


def test_agents_with_the_openai_package(port: int) -> None:
    names = execute("docs/integrations/own.md", 1, port, {})
    assert len(names["messages"]) == 5
    assert names["spans"][0]["start"] == 0
    known = httpx.get(f"http://localhost:{port}/april/trajectories/t17", params={"run": "my-run"}, timeout=60).json()
    assert len(known["legs"]) >= 2, "more if the test is run again"


def test_agents_through_the_router(port: int) -> None:
    """Without the router: test_sglang_router.py has one."""
    text = block("docs/integrations/own.md", 3).replace("8000", str(port))
    names: dict[str, Any] = {}
    exec(compile(text, "own.md", "exec"), names)
    reply = names["client"].chat.completions.create(
        model="default", messages=[{"role": "user", "content": "1"}], max_tokens=4
    )
    assert reply.model_extra["metadata"]["april"][0]["trajectory"] == "t17"


def execute(page: str, number: int, port: int, names: dict[str, Any]) -> dict[str, Any]:
    """Run a Python block with these names."""
    exec(compile(block(page, number).replace("30000", str(port)), page, "exec"), names)
    return names


@pytest.mark.parametrize("found", blocks("bash"), ids=lambda found: found.name)
def test_commands(found: CodeBlock) -> None:
    if (found.page, found.number) not in STORY:
        assert commands(found.text)
        for words in commands(found.text):
            check_command(words)


@pytest.mark.parametrize("found", blocks("python"), ids=lambda found: found.name)
def test_every_python_block_runs(found: CodeBlock) -> None:
    if (found.page, found.number) in COMPILED:
        exec("\n".join(line for line in found.text.splitlines() if line.startswith("from ")), {})
        compile(found.text, found.page, "exec")
    else:
        assert (found.page, found.number) in STORY


@pytest.mark.parametrize("page", sorted((ROOT / "docs/integrations").glob("*.md")), ids=lambda page: page.stem)
def test_names_and_settings_for_other_trainers(page: Path) -> None:
    """What other trainers load by its dotted name exists (they need not be installed), and SGLANG_APRIL is accepted."""
    text = page.read_text()
    for module, name in re.findall(r"(sglang_april(?:\.[a-z_]+)*)\.(\w+)", text):
        folder = ROOT / module.replace(".", "/")
        if (folder / name).is_dir() or (folder / f"{name}.py").exists():
            continue
        tree = ast.parse(folder.with_suffix(".py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    given = re.findall(r"SGLANG_APRIL\W{1,5}(\{.*?\})", text)
    assert given or page.stem == "own"
    for settings in given:
        assert config.from_env({"SGLANG_APRIL": settings.replace('\\"', '"')})["quota"] == 32


def test_no_code_is_hidden_from_these_tests() -> None:
    """Code is fenced and has a language; a block without code is `text`, or has none in the design's diagrams."""
    languages = {found.page for found in blocks("")}
    assert languages <= {"docs/design.md"}
    assert len(blocks("bash")) > 10
