"""The review of a release by its wheel, of small made-up releases, and the manifest that it writes."""

import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_april.adapter import preflight, review, versions

ENGINE = '''
class Engine:
    """What the adapter hooks."""

    def step(self, tokens: int) -> int:
        return tokens + 1

    def flush(self) -> None: ...

    async def pause(self) -> None: ...
'''
ARGUMENTS = """
class ServerArgs:
    model_path: A[str, "the model"]
    tp_size: A[int, Arg(help="ranks")] = 1
    limit: ClassVar[int] = 7
"""
ENVIRON = """
class Envs:
    SGLANG_LOG_GC = EnvBool(False)
    plain = 3
"""
POOLS = """
class KVCache(abc.ABC): ...
class MHATokenToKVPool(KVCache): ...
class FP8Pool(MHATokenToKVPool): ...
class AbstractPool(KVCache):
    @abc.abstractmethod
    def get(self): ...
class Unrelated: ...
"""
FILES = {
    "sglang/__init__.py": "raise AssertionError('a review imports nothing')\n",
    "sglang/engine.py": ENGINE,
    "sglang/srt/server_args.py": ARGUMENTS,
    "sglang/srt/environ.py": ENVIRON,
    "sglang/srt/mem_cache/memory_pool.py": POOLS,
}
ADAPTER = {
    "__init__.py": "",
    "shape.py": """
class Shape:
    DEPENDS_ON, TARGETS, HOOKS = ("sglang.engine.Engine.pause",), {}, ()
SHAPE = Shape()
""",
    "hook_table.py": """
from sglang_april.adapter.hook import Hook
HOOKS = (Hook("around", "hooks:multiply", ("sglang.engine.Engine.step",), "to multiply", "never"),)
DEPENDS_ON = ("sglang.engine.Engine.flush",)
""",
    "arguments.py": """
from sglang_april.adapter.refusals import accept
ARGUMENTS = (accept("model_path tp_size", "they are harmless"),)
""",
    "environment.py": """
from sglang_april.adapter.refusals import accept
ENVIRONMENT = (accept("SGLANG_LOG_*", "they only observe"),)
""",
    "reviewed_pools.py": 'SUPPORTED_POOLS = ("MHATokenToKVPool",)\nREFUSED_POOLS = {"FP8Pool": "it keeps scales"}\n',
}
PACKAGE = "reviewed_adapter"

Wheel = Callable[..., str]
Run = Callable[..., int]
Output = pytest.CaptureFixture[str]


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    """`wheel(version, file=(old, new), …)`: the path of a release's wheel, with text replaced."""

    def write(version: str, **edits: tuple[str, str]) -> str:
        path = tmp_path / f"sglang-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in FILES.items():
                old, new = edits.get(Path(name).stem, ("", ""))
                assert old in text
                archive.writestr(name, text.replace(old, new) if old else text)
        return str(path)

    return write


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: Wheel) -> Iterator[Run]:
    """The command, where 9.9.1 was reviewed, and its source is there, for an adapter package of its own."""
    package = tmp_path / PACKAGE
    package.mkdir()
    for name, text in ADAPTER.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(versions, "FINGERPRINTS", tmp_path / "fingerprints")
    versions.FINGERPRINTS.mkdir()
    wheels = tmp_path / "wheels"
    root = review.source_of(wheel("9.9.1"), wheels).rename(wheels / "sglang-9.9.1")
    monkeypatch.setattr(versions, "CORE", PACKAGE)
    monkeypatch.setattr(versions, "SHAPES", PACKAGE)
    paths = preflight.symbols_in_use(versions.load_hook_table("shape"))
    manifest = review.build_manifest("9.9.1", "shape", root, paths)
    (versions.FINGERPRINTS / "9.9.1.json").write_text(json.dumps(manifest))

    def command(*argv: str) -> int:
        versions._read.cache_clear()
        return review.main([*argv, "--wheels", str(wheels)])

    yield command
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_unchanged_release_leaves_nothing_to_review(run: Run, wheel: Wheel, capsys: Output) -> None:
    """Comments, docstrings and formatting are no change."""
    edit = ("        return tokens + 1", '        """New."""\n        # new\n        return (tokens +\n 1)')
    assert run(wheel("9.9.2", engine=edit)) == 0
    assert capsys.readouterr().out == (
        "SGLang 9.9.2 compared with the reviewed 9.9.1: "
        "3 symbols unchanged, 0 changed or new, 0 gone; 0 hooks concerned\n"
    )


def test_changed_symbol_is_shown_with_its_hook_and_diff(run: Run, wheel: Wheel, capsys: Output) -> None:
    assert run(wheel("9.9.2", engine=("(self, tokens: int) -> int:\n", "(self, tokens: int = 0) -> int:\n"))) == 1
    out = capsys.readouterr().out
    assert "2 symbols unchanged, 1 changed or new, 0 gone; 1 hooks concerned" in out
    assert (
        "sglang.engine.Engine.step: signature\n  hook around hooks:multiply: to multiply\n--- 9.9.1\n+++ 9.9.2" in out
    )
    assert "-def step(self, tokens: int) -> int:\n+def step(self, tokens: int=0) -> int:\n" in out


def test_summary_has_no_diffs(run: Run, wheel: Wheel, capsys: Output) -> None:
    assert run(wheel("9.9.2", engine=("tokens + 1", "tokens + 2")), "--summary") == 1
    out = capsys.readouterr().out
    assert "sglang.engine.Engine.step: body" in out
    assert "+++" not in out


def test_method_that_became_async_and_one_that_is_gone(run: Run, wheel: Wheel, capsys: Output) -> None:
    assert run(wheel("9.9.2", engine=("    def step", "    async def step"))) == 1
    assert "sglang.engine.Engine.step: kind" in capsys.readouterr().out
    assert run(wheel("9.9.3", engine=("    def flush", "    def clear"))) == 1
    assert "sglang.engine.Engine.flush: gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (
            {"server_args": ("    limit", "    magic: A[bool, 'm'] = False\n    limit")},
            "argument magic (default False)",
        ),
        (
            {"environ": ("    plain", "    SGLANG_KV = EnvInt(2)\n    plain")},
            "variable SGLANG_KV (EnvInt(2))",
        ),
        ({"memory_pool": ("FP8Pool", "FP6Pool")}, "KV pool FP6Pool"),
        (
            {"server_args": ("class ServerArgs", "class Renamed")},
            "the arguments or environment variables cannot be read",
        ),
    ],
)
def test_what_no_list_names_is_left_to_review(
    edit: dict[str, tuple[str, str]],
    line: str,
    run: Run,
    wheel: Wheel,
    capsys: Output,
) -> None:
    assert run(wheel("9.9.2", **edit)) == 1
    assert line in capsys.readouterr().out


def test_other_defaults_are_shown(run: Run, wheel: Wheel, capsys: Output) -> None:
    run(wheel("9.9.2", server_args=("= 1\n", "= 2\n"), environ=("False", "True")))
    assert (
        "other defaults:\n  tp_size: 1 → 2\n  SGLANG_LOG_GC: EnvBool(False) → EnvBool(True)" in capsys.readouterr().out
    )


def test_accepted_source_is_selected_whatever_it_calls_itself(run: Run, wheel: Wheel) -> None:
    changed = wheel("9.9.2", engine=("tokens + 1", "tokens + 2"))
    root = review.source_of(changed, Path(changed).parent / "other")
    with pytest.raises(versions.PreflightError, match=r"only the reviewed sources of 9\.9\.1: compared with"):
        versions.select(root, versions.FINGERPRINTS)
    assert run(changed, "--accept") == 0
    versions._read.cache_clear()
    assert versions.select(root, versions.FINGERPRINTS)["sglang"] == "9.9.2"
    assert versions.select(root.parent.parent / "wheels/sglang-9.9.1", versions.FINGERPRINTS)["sglang"] == "9.9.1"
    root.rename(root.parent.parent / "wheels/sglang-9.9.2")
    assert run() == 0, "both manifests agree with their sources"


def test_patched_tree_is_reviewed_under_its_own_name(run: Run, wheel: Wheel, tmp_path: Path) -> None:
    root = review.source_of(wheel("9.9.1", engine=("tokens + 1", "tokens + 3")), tmp_path / "other")
    with pytest.raises(SystemExit, match=r"give the source in .* a name with --name"):
        run(str(root))
    assert run(str(root), "--name", "9.9.1+patched", "--accept") == 0
    versions._read.cache_clear()
    assert versions.select(root, versions.FINGERPRINTS)["sglang"] == "9.9.1+patched"
    assert run() == 0, "of all reviewed sources, those of releases are checked"


def test_source_without_a_symbol_is_not_accepted(run: Run, wheel: Wheel) -> None:
    with pytest.raises(SystemExit, match=r"no manifest was written: .* has no sglang\.engine\.Engine\.flush"):
        run(wheel("9.9.2", engine=("    def flush", "    def clear")), "--accept")
    assert [file.name for file in versions.FINGERPRINTS.iterdir()] == ["9.9.1.json"]


def test_symbol_that_the_adapter_begins_to_use_is_new_in_every_manifest(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    table = sys.modules[f"{PACKAGE}.hook_table"]
    monkeypatch.setattr(table, "DEPENDS_ON", (*table.DEPENDS_ON, "sglang.engine.Engine"))
    assert run() == 1
    assert "sglang.engine.Engine: new in the adapter" in capsys.readouterr().out
    assert run("--accept") == 0
    assert run() == 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["latest"], "latest is neither a version such as 0.5.17, nor a wheel, nor a folder"),
        (["none.whl"], "there is no wheel none.whl"),
        (["{tmp}", "--name", "x"], "the folder .* has no package sglang; name the folder that contains it"),
        (["{tmp}/broken-9.9.2-py3.whl"], "is not a wheel"),
        (["{tmp}/sglang-9.9.2-py3-none-any.whl", "--base", "9.8"], r"9\.8 was not reviewed, only 9\.9\.1"),
    ],
)
def test_errors_are_one_sentence(argv: list[str], sentence: str, run: Run, wheel: Wheel, tmp_path: Path) -> None:
    wheel("9.9.2")
    (tmp_path / "broken-9.9.2-py3.whl").write_text("no archive")
    with pytest.raises(SystemExit, match=f"sglang-april: .*{sentence}"):
        run(*(word.format(tmp=tmp_path) for word in argv))


def test_release_that_cannot_be_downloaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"the wheel of SGLang 9\.9\.2 cannot be downloaded: No matching distribution"):
        run("9.9.2")


def test_nearest_release() -> None:
    reviewed = ["0.5.18", "0.5.15.post1", "0.5.16", "0.5.17"]
    assert [review.nearest(name, reviewed) for name in ("0.5.23", "0.5.17.post1", "0.5.15", "0.4.9")] == [
        "0.5.18",
        "0.5.17",
        "0.5.15.post1",
        "0.5.15.post1",
    ]
