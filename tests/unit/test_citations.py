"""Every document, section, file, test and invariant that code, tests and documents cite exists in the repository."""

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"
NUMBERED = re.compile(
    r"\bS(?:1[01]|[1-9])\b(?!\.\d)|\b[Rr]ules? \d\b|\b[Ss]teps? \d of 9\b|\b[Dd]esign section \d|design\.md,? section"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.<…-])((?:[\w.-]+/)+[\w-]+\.(?:py|md|sh|yaml|json|png|toml))(?:::(\w+))?(?![\w…*])")
DEFINED_IN = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)?)` in `([\w/.]+\.py)`")
KEBAB = re.compile(r"`([a-z]+(?:-[a-z]+)+)`")
WORD_LIMITS = {"README.md": 1400, "docs/benchmarks.md": 3000}
VARIANTS = {
    "april-keep",
    "april-auto",
    "april-recompute",
    "april-continue",
    "pause-in-place",
    "pause-retract",
    "stale-reuse",
}
HEADERS = {"x-april-group", "x-april-run", "x-april-seed", "x-april-trajectory", "x-smg-routing-key"}
HEADERS |= {"x-request-id-april-run", "x-request-id-april-trajectory"}
OTHER_NAMES = {"april-convert", "april-train", "cpu-long", "cuda-tile", "math-verify", "short-rounds"} | HEADERS
"""Commands, presets and packages."""
GENERATED = ("out/", "bench/results/", "dist/")
PACKAGES = ("sglang_april/", "sglang_april/adapter/", "trainer_bridge/", "kernels/april_kernels/")
FOLDERS = ("", *PACKAGES, "bench/", "docs/", "tests/")
"""Where a shortened path may begin."""


@cache
def texts(*suffixes: str) -> dict[str, str]:
    """Tracked files by name."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *(f"*{suffix}" for suffix in suffixes)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = {name: ROOT / name for name in names if name != "tests/unit/test_citations.py"}
    return {name: path.read_text() for name, path in files.items() if path.is_file()}


def anchors(text: str) -> set[str]:
    """Anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(name: str, text: str) -> list[str]:
    """Relative links that lead to no file or to no heading."""
    broken = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions, classes, methods and constants of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{member.name}" for member in members}
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def missing_paths(name: str, text: str) -> list[str]:
    """Paths of this repository that do not exist, and tests that their file does not define."""
    missing = []
    for path, test in PATH.findall(text):
        first = path.split("/")[0]
        if path.startswith(GENERATED) or "//" in path:
            continue
        candidates = [ROOT / folder / path for folder in FOLDERS] + [(ROOT / name).parent / path]
        file = next((file for file in candidates if file.is_file()), None)
        actual = any((ROOT / folder / first).is_dir() for folder in FOLDERS)
        if file is None and actual:
            missing.append(path)
        elif file is not None and test and test not in definitions(file):
            missing.append(f"{path}::{test}")
    return missing


def invariants() -> set[str]:
    """Names of the specification's invariants."""
    text = DESIGN.read_text()
    return set(re.findall(r"^### ([a-z]+(?:-[a-z]+)+)$", text, re.MULTILINE))


def unknown_invariants(text: str) -> list[str]:
    """Names written like invariants that the specification does not have."""
    return [name for name in KEBAB.findall(text) if name not in invariants() | VARIANTS | OTHER_NAMES]


def undefined(text: str) -> list[str]:
    """Statements "`function` in `file`" about a function that the file does not define."""
    return [f"{name} in {path}" for name, path in DEFINED_IN.findall(text) if name not in definitions(ROOT / path)]


def words(text: str) -> int:
    """Words of a page; table rules and bars are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_specification_names_its_invariants() -> None:
    assert len(invariants()) >= 20


@pytest.mark.parametrize("name", sorted(texts(".md")))
def test_links_of_a_page(name: str) -> None:
    assert not broken_links(name, texts(".md")[name])


@pytest.mark.parametrize("suffix", [".md", ".py", ".sh", ".toml"])
def test_cited_paths_and_tests_exist(suffix: str) -> None:
    missing = {name: found for name, text in texts(suffix).items() if (found := missing_paths(name, text))}
    assert not missing


@pytest.mark.parametrize("suffix", [".md", ".py", ".sh", ".toml"])
def test_no_numbered_rule_is_cited(suffix: str) -> None:
    assert not {name: found for name, text in texts(suffix).items() if (found := NUMBERED.findall(text))}


@pytest.mark.parametrize("suffix", [".md", ".py"])
def test_cited_invariants_exist(suffix: str) -> None:
    assert not {name: found for name, text in texts(suffix).items() if (found := unknown_invariants(text))}


def test_the_specification_names_existing_code() -> None:
    assert not undefined(DESIGN.read_text())


@pytest.mark.parametrize(("name", "limit"), WORD_LIMITS.items())
def test_length_of_a_page(name: str, limit: int) -> None:
    assert words((ROOT / name).read_text()) <= limit


def test_each_check_can_fail() -> None:
    assert broken_links("README.md", "[a](docs/nowhere.md) [b](docs/design.md#no-such-heading)") == [
        "docs/nowhere.md",
        "docs/design.md#no-such-heading",
    ]
    assert missing_paths("README.md", "see `scheduler/nothing.py` and tests/unit/test_quota.py::test_nothing") == [
        "scheduler/nothing.py",
        "tests/unit/test_quota.py::test_nothing",
    ]
    assert NUMBERED.findall("as S3 says, rule 5; design.md, section 4")
    assert unknown_invariants("(`delivered-once`, `delivered-twice`) see `one-plaice`") == [
        "delivered-twice",
        "one-plaice",
    ]
    assert undefined("`nothing` in `sglang_april/config.py`") == ["nothing in sglang_april/config.py"]
    assert words("| a | --- | b |") == 2
