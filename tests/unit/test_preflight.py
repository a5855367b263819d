"""The preflight: what was reviewed passes, whatever changed is named."""

import ast
import importlib.machinery
import importlib.util
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_april.adapter import preflight
from sglang_april.adapter.v0_5_17 import hook_table

TARGET = "sglang.srt.server_args.ServerArgs.check_server_args"
FILE = "sglang/srt/server_args.py"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reviewed files of the installed SGLang, which a test may change."""
    for file in preflight.reviewed_manifest(preflight.sglang_version())["files"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(preflight.sglang_root() / file, tmp_path / file)
    monkeypatch.setattr(preflight, "sglang_root", lambda: tmp_path)
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    text = (root / FILE).read_text()
    assert old in text
    (root / FILE).write_text(text.replace(old, new, 1))


def test_the_installed_sglang_passes_quickly() -> None:
    start = time.perf_counter()
    preflight.check()
    assert time.perf_counter() - start < 0.5


def test_every_hook_and_dependency_is_in_the_manifest() -> None:
    manifest = preflight.reviewed_manifest("0.5.17")
    assert set(preflight.symbols_in_use()) == set(manifest["symbols"])


def test_a_comment_or_a_docstring_changes_nothing(copy: Path) -> None:
    head = "    def check_server_args(self):\n"
    edit(copy, head, head + '        """New."""\n        # new\n')
    preflight.check()


def test_a_changed_body_is_named(copy: Path) -> None:
    edit(copy, "        # Check parallel size constraints\n", "        self.tp_size += 0\n")
    with pytest.raises(preflight.PreflightError, match=f"the body of {TARGET} is not the one reviewed"):
        preflight.check()


def test_a_changed_signature_is_named(copy: Path) -> None:
    edit(copy, "    def check_server_args(self):", "    def check_server_args(self, strict=False):")
    with pytest.raises(preflight.PreflightError, match=f"the signature of {TARGET} is not the one reviewed"):
        preflight.check()


def test_a_function_that_became_async_is_named(copy: Path) -> None:
    edit(copy, "    def check_server_args(self):", "    async def check_server_args(self):")
    with pytest.raises(preflight.PreflightError, match=f"the kind of {TARGET} is not the one reviewed"):
        preflight.check()


def test_a_missing_target_is_named(copy: Path) -> None:
    edit(copy, "    def check_server_args(self):", "    def validate(self):")
    with pytest.raises(preflight.PreflightError, match=f"{TARGET} does not exist"):
        preflight.check()


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / FILE).unlink()
    with pytest.raises(preflight.PreflightError, match=r"sglang\.srt\.server_args\.\S+ does not exist"):
        preflight.check()


def test_an_unsupported_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "sglang_version", lambda: "9.9.9")
    with pytest.raises(preflight.PreflightError, match=r"SGLang 9\.9\.9 is not supported, only 0\.5\.17"):
        preflight.check()


def test_a_target_that_nobody_reviewed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_table, "DEPENDS_ON", ("sglang.srt.server_args.PortArgs.init_new",))
    with pytest.raises(preflight.PreflightError, match=r"PortArgs\.init_new is not in the reviewed manifest"):
        preflight.check()


def test_fields_of_a_dataclass_are_compared() -> None:
    def fields(source: str) -> dict[str, Any]:
        node = ast.parse(source).body[0]
        assert isinstance(node, ast.ClassDef)
        return preflight.fingerprint(node)

    one = fields("class C:\n    a: int\n    b: int = 0\n    def f(self): return 1")
    assert one == fields("class C:\n    a: int\n    b: int = 0\n    def f(self): return 2")
    assert one != fields("class C:\n    a: int\n    b: int = 1\n    def f(self): return 1")


def test_written_manifest_is_the_reviewed_one() -> None:
    written = preflight.build_manifest("0.5.17", preflight.sglang_root(), preflight.symbols_in_use())
    assert json.loads(json.dumps(written)) == preflight.reviewed_manifest("0.5.17")


def test_no_hook_receives_a_coroutine_for_a_result() -> None:
    symbols = preflight.reviewed_manifest("0.5.17")["symbols"]
    assert not [
        row.path for row in hook_table.TARGETS if row.kind == "after" and symbols[row.path]["kind"] == "async def"
    ]


@pytest.mark.parametrize("origin", [None, str(preflight.REPOSITORY / "kernels" / "__init__.py")])
def test_a_folder_that_hides_kernels_is_refused(origin: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("kernels", None, origin=origin, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(preflight.PreflightError, match="hides the package kernels"):
        preflight.check_kernels_package()
