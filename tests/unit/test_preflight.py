"""The preflight accepts the reviewed SGLang and reports every change by name."""

import ast
import importlib.machinery
import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_april.adapter import preflight, review, source_tree, versions
from sglang_april.adapter.core import hook_table

TARGET = "sglang.srt.server_args.ServerArgs.check_server_args"
FILE = "sglang/srt/server_args.py"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reviewed files of the installed SGLang for a test to modify."""
    for file in versions.installed()["files"]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(versions.sglang_root() / file, tmp_path / file)
    monkeypatch.setattr(versions, "sglang_root", lambda: tmp_path)
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    text = (root / FILE).read_text()
    assert old in text
    (root / FILE).write_text(text.replace(old, new, 1))


def test_installed_sglang_passes() -> None:
    preflight.check()


def test_every_hook_and_dependency_is_in_the_manifest() -> None:
    for manifest in versions.manifests().values():
        table = versions.load_hook_table(manifest["shape"])
        assert set(preflight.symbols_in_use(table)) == set(manifest["symbols"])


def test_comments_and_docstrings_are_ignored(copy: Path) -> None:
    head = "    def check_server_args(self):\n"
    edit(copy, head, head + '        """New."""\n        # new\n')
    preflight.check()


def test_changed_body_is_reported(copy: Path) -> None:
    edit(copy, "        # Check parallel size constraints\n", "        self.tp_size += 0\n")
    with pytest.raises(preflight.PreflightError, match=f"the body of {TARGET} has changed"):
        preflight.check()


def test_changed_signature_is_reported(copy: Path) -> None:
    edit(copy, "    def check_server_args(self):", "    def check_server_args(self, strict=False):")
    with pytest.raises(preflight.PreflightError, match=f"the signature of {TARGET} has changed"):
        preflight.check()


def test_function_that_became_async_is_reported(copy: Path) -> None:
    edit(copy, "    def check_server_args(self):", "    async def check_server_args(self):")
    with pytest.raises(preflight.PreflightError, match=f"the kind of {TARGET} has changed"):
        preflight.check()


def test_missing_target_is_reported(copy: Path) -> None:
    edit(copy, "    def check_server_args(self):", "    def validate(self):")
    with pytest.raises(preflight.PreflightError, match=f"{TARGET} does not exist"):
        preflight.check()


def test_missing_file_is_reported(copy: Path) -> None:
    (copy / FILE).unlink()
    with pytest.raises(preflight.PreflightError, match=r"sglang\.srt\.server_args\.\S+ does not exist"):
        preflight.check()


def test_unsupported_source_is_reported_with_what_it_calls_itself(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version_string", lambda: "9.9.9")
    edit(copy, "    def check_server_args(self):", "    def validate(self):")
    named = re.escape(", ".join(versions.manifests()))
    with pytest.raises(preflight.PreflightError, match=rf"this SGLang 9\.9\.9 is not supported, only .* {named}: "):
        preflight.check()


def test_unreviewed_symbol_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_table, "DEPENDS_ON", ("sglang.srt.server_args.PortArgs.init_new",))
    with pytest.raises(preflight.PreflightError, match=r"PortArgs\.init_new is not in the reviewed manifest"):
        preflight.check()


def test_fields_of_a_dataclass_are_compared() -> None:
    def fields(source: str) -> dict[str, Any]:
        node = ast.parse(source).body[0]
        assert isinstance(node, ast.ClassDef)
        return source_tree.fingerprint(node)

    one = fields("class C:\n    a: int\n    b: int = 0\n    def f(self): return 1")
    assert one == fields("class C:\n    a: int\n    b: int = 0\n    def f(self): return 2")
    assert one != fields("class C:\n    a: int\n    b: int = 1\n    def f(self): return 1")


def test_written_manifest_equals_the_reviewed_one() -> None:
    reviewed = versions.installed()
    written = review.build_manifest(
        reviewed["sglang"], reviewed["shape"], versions.sglang_root(), preflight.symbols_in_use(versions.hook_table())
    )
    assert json.loads(json.dumps(written)) == reviewed


def test_after_hooks_never_receive_a_coroutine() -> None:
    symbols = versions.installed()["symbols"]
    after = [path for row in hook_table.HOOKS if row.kind == "after" for path in row.paths]
    assert not [path for path in after if symbols[path]["kind"] == "async def"]


def test_folder_that_hides_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("kernels", None, is_package=True)
    spec.submodule_search_locations = ["/checkout/kernels"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    with pytest.raises(preflight.PreflightError, match="the folder /checkout/kernels hides the package kernels"):
        preflight.check_kernels_package()


def test_hugging_faces_kernels_is_accepted_beside_an_installed_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lie in one folder then, site-packages."""
    beside = Path(preflight.__file__).parents[2] / "kernels" / "__init__.py"
    spec = importlib.machinery.ModuleSpec("kernels", None, origin=str(beside), is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    preflight.check_kernels_package()
