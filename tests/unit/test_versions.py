"""A made-up SGLang release: its manifest names its shape, and the hooks of a made-up core are applied and verified."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_april.adapter import hooking, preflight, review, versions
from tests.unit.fake_adapter import engine, hook_table

PACKAGE = "tests.unit.fake_adapter"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """SGLang 9.9.9 is "installed": the repository acts as its source tree, `fake_adapter/engine.py` for its code.

    Its version string differs: only the source selects the adapter.
    """
    monkeypatch.setattr(versions, "FINGERPRINTS", tmp_path)
    monkeypatch.setattr(versions, "version_string", lambda: "0.0.0.dev1")
    monkeypatch.setattr(versions, "sglang_root", lambda: ROOT)
    monkeypatch.setattr(versions, "CORE", PACKAGE)
    monkeypatch.setattr(versions, "SHAPES", PACKAGE)
    paths = preflight.symbols_in_use(versions.load_hook_table("shape"))
    manifest = review.build_manifest("9.9.9", "shape", ROOT, paths)
    (tmp_path / "9.9.9.json").write_text(json.dumps(manifest))
    return "9.9.9"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hook registries of SGLang and of the plugin: empty during the test, restored after it."""
    monkeypatch.setattr(hooking, "_applied", [])
    monkeypatch.setattr(hooking, "_verified", [])
    monkeypatch.setattr(HookRegistry, "apply_hooks", HookRegistry.apply_hooks)
    saved = {name: value.copy() for name, value in vars(HookRegistry).items() if isinstance(value, dict | set | list)}
    original = engine.Engine.step
    for name in saved:
        getattr(HookRegistry, name).clear()
    yield
    engine.Engine.step = original  # type: ignore[method-assign]
    for name, value in saved.items():
        monkeypatch.setattr(HookRegistry, name, value)


def test_manifest_names_the_shape(release: str) -> None:
    assert list(versions.manifests()) == [release]
    assert versions.installed()["shape"] == "shape"
    with pytest.raises(versions.PreflightError, match=r"there is no shape round in tests\.unit\.fake_adapter"):
        versions.load_shape("round")
    assert versions.hook_table().HOOKS == hook_table.HOOKS
    preflight.check()


def test_links_point_to_the_release(release: str) -> None:
    link = versions.upstream_link(versions.installed(), hook_table.HOOKS[0].paths[0])
    assert link.startswith(
        "https://github.com/sgl-project/sglang/blob/v9.9.9/python/tests/unit/fake_adapter/engine.py#L"
    )


def test_hooks_of_the_release_are_applied_and_verified(release: str, registry: None) -> None:
    assert engine.Engine().step(1) == 2
    hooking.apply()
    HookRegistry.apply_hooks()
    assert engine.Engine().step(1) == 20
    assert hooking.hook_report()["hooks"] == [f"{PACKAGE}.engine.Engine.step [around]"]


def test_missing_hook_ends_the_process(release: str, registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard: SGLang skips a hook that it cannot apply, and the verification ends the process."""
    hooking.apply()
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.engine", ModuleType("empty"))
    with pytest.raises(SystemExit, match=r"engine\.Engine\.step"):
        HookRegistry.apply_hooks()
