"""The hook table: every row names an existing handler, existing targets, a reason and when it can be removed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_april.adapter import source_tree, versions
from sglang_april.adapter.core.hook_table import HOOKS
from sglang_april.adapter.hook import Hook

ROOT = Path(__file__).parents[2]
PACKAGE = "sglang_april.adapter.core"


SHAPES = [versions.load_shape(name) for name in sorted({each["shape"] for each in versions.manifests().values()})]


@pytest.mark.parametrize("row", [*HOOKS, *(row for each in SHAPES for row in each.HOOKS)], ids=lambda row: row.handler)
def test_row_is_complete(row: Hook) -> None:
    handler = f"{PACKAGE}.{row.handler}".replace(":", ".")
    assert (source_tree.describe(handler, ROOT) or {})["kind"] in ("def", "async def")
    assert row.paths
    assert row.why
    assert row.remove_when


@pytest.mark.parametrize("path", [path for row in versions.hook_table().HOOKS for path in row.paths])
def test_upstream_link_points_to_the_hooked_function(path: str) -> None:
    manifest = versions.installed()
    file, line = versions.upstream_link(manifest, path).removeprefix(manifest["source"]).split("#L")
    source = (versions.sglang_root() / file).read_text().splitlines()
    assert re.match(rf"\s*(async )?def {path.rpartition('.')[2]}\(", source[int(line) - 1])


def test_only_the_selection_of_versions_leads_to_the_core() -> None:
    """No module outside `adapter/core/` imports it: everything that depends on SGLang is behind `versions`."""
    for file in (ROOT / "sglang_april").rglob("*.py"):
        if file.is_relative_to(ROOT / PACKAGE.replace(".", "/")):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not any(name.startswith(PACKAGE) for name in names), file


CONSTANTS = {
    "sglang.srt.constants.GPU_MEMORY_ALL_TYPES",
    "sglang.srt.constants.GPU_MEMORY_TYPE_WEIGHTS",
    "sglang.srt.constants.HEALTH_CHECK_RID_PREFIX",
    "sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS",
}
"""A manifest holds functions and classes."""

ELSEWHERE = {"sglang.srt.utils.kill_process_tree": "sglang.srt.utils.common.kill_process_tree"}
"""Names imported from a module other than the one that defines them."""


def imported_names() -> Iterator[tuple[str, bool]]:
    """Dotted names that the adapter imports from SGLang, and whether a shape does."""
    for file in (ROOT / "sglang_april" / "adapter").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("sglang.") for name in node.names), file
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                yield from ((f"{node.module}.{name.name}", file.parent.name == "shapes") for name in node.names)


@pytest.mark.parametrize(("name", "by_shape"), sorted(set(imported_names())))
def test_imported_names_are_reviewed(name: str, by_shape: bool) -> None:
    """The name itself, or a member of it that is hooked or called, is in every manifest; a shape's in one of them."""
    if name in CONSTANTS:
        return
    place = ELSEWHERE.get(name, name)
    found = [
        any(path == place or path.startswith(f"{place}.") for path in manifest["symbols"])
        for manifest in versions.manifests().values()
    ]
    assert any(found) if by_shape else all(found)
