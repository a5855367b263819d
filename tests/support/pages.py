"""Code blocks of README.md and docs/, and checks of those that no test can run."""

import argparse
import inspect
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tests.support import router

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block."""

    page: str
    """Relative to the repository."""
    number: int
    """Among the blocks of its page, from 0."""
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}[{self.number}]"


def blocks(language: str) -> list[CodeBlock]:
    """All blocks of a language."""
    found = []
    for path in PAGES:
        fences = enumerate(FENCE.findall(path.read_text()))
        found += [CodeBlock(str(path.relative_to(ROOT)), i, kind, text) for i, (_, kind, text) in fences]
    return [block for block in found if block.language == language]


def block(page: str, number: int) -> str:
    """The text of one block."""
    (text,) = [b.text for kind in ("bash", "python") for b in blocks(kind) if (b.page, b.number) == (page, number)]
    return text


def commands(text: str) -> list[list[str]]:
    """The commands of a block, in words; without the programs and files that it feeds to them."""
    text = re.sub(r"<<'END'\n.*?^END$", "", text.replace("\\\n", " "), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"  +# .*", "", text)
    lines = shlex.shlex(text, posix=True, punctuation_chars="&\n")
    lines.whitespace, lines.whitespace_split, lines.commenters = " \t", True, ""
    found: list[list[str]] = [[]]
    for word in lines:
        if set(word) <= set("&\n"):
            found.append([])
        else:
            found[-1].append(word)
    return [words for words in found if words]


def check_command(words: list[str]) -> None:
    """Raise an AssertionError if the command does not exist, or would refuse its arguments."""
    while re.match(r"[A-Z_]+=", words[0]):  # variables of its environment
        words = words[1:]
    program = " ".join(words[:3]) if words[0] == "python" else words[0]
    assert program in CHECKS, f"no check for {program!r}"
    CHECKS[program](words[3:] if words[0] == "python" else words[1:])


def _make(arguments: list[str]) -> None:
    """Make knows every target and prints what it would run."""
    done = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _launch(words: list[str]) -> None:
    from sglang.srt.server_args import ServerArgs

    from sglang_april import config

    config.from_argv(words)
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    _, unknown = parser.parse_known_args(words)
    assert all(word.startswith("--april-") or not word.startswith("-") for word in unknown), unknown


def _train(words: list[str]) -> None:
    from trainer_bridge.args import config_parser

    if words[0] != "report":
        flags = vars(config_parser().parse_args(words))
        assert flags["config"].exists() or flags["config"].name == "my.yaml" or flags["config"].parts[0] == "out"


def _pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words.pop(0) == "install"
    words = words[words[0] == "--no-deps" :]
    assert words[0].startswith((".", "sglang_april-")), "the package is on no index"
    for name in re.findall(r"\w+", ",".join(re.findall(r"\[(.*?)\]", words[0]))):
        assert name in extras
        if name == "engine":  # without a release, pip takes the newest, which not every machine can install
            assert words[1:] == ["sglang==0.5.17"], "name the SGLang release"


def _curl(words: list[str]) -> None:
    assert words[0].startswith(("localhost:30000/", "localhost:8000/"))


def _router(words: list[str]) -> None:
    """Its flags are those with which tests start the router."""
    used = inspect.getsource(router.sglang_router)
    assert all(f'"{word}"' in used for word in words if word.startswith("--"))


def _files_exist(words: list[str]) -> None:
    for word in words:
        assert word.startswith("-") or (ROOT / word).exists(), word


def _module(name: str) -> Callable[[list[str]], None]:
    def check(_words: list[str]) -> None:
        assert find_spec(name) is not None

    return check


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": _make,
    "source": lambda _: None,
    "pip": _pip,
    "curl": _curl,
    "april-train": _train,
    "prometheus": _files_exist,
    "pytest": lambda words: _files_exist([word for word in words if word.endswith(".py")]),
    "python -m sglang_april.launch_server": _launch,
    "python -m sglang_router.launch_router": _router,
    "python -m sglang_april.top": _module("sglang_april.top"),
}
