"""The table of hooks: every row leads somewhere and says why it is there."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_april.adapter import preflight
from sglang_april.adapter.hook import Hook
from sglang_april.adapter.v0_5_17.hook_table import TARGETS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.path}-{target.kind}")
def test_the_handler_exists(target: Hook) -> None:
    assert preflight.describe(target.handler.replace(":", "."), ROOT)["kind"] in ("def", "async def")


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.path}-{target.kind}")
def test_the_row_is_explained(target: Hook) -> None:
    assert target.why
    assert target.remove_when
    module = preflight.locate(target.path, preflight.sglang_root())[0]
    assert module.removeprefix("sglang/srt/") in target.upstream


CONSTANTS = {
    "sglang.srt.constants.GPU_MEMORY_ALL_TYPES",
    "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
}
"""A manifest holds functions and classes."""

ELSEWHERE = {"sglang.srt.utils.kill_process_tree": "sglang.srt.utils.common.kill_process_tree"}
"""Names that are imported from another module than their own."""


def imported_names() -> Iterator[str]:
    """What the adapter imports from SGLang."""
    for file in (ROOT / "sglang_april" / "adapter").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("sglang.") for name in node.names), file
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("name", sorted(set(imported_names()) - CONSTANTS))
def test_what_the_adapter_imports_is_reviewed(name: str) -> None:
    """The name itself, or something in it that we hook or call."""
    place = ELSEWHERE.get(name, name)
    assert any(path == place or path.startswith(f"{place}.") for path in preflight.symbols_in_use())
