"""Before anything is hooked: the installed SGLang must be one whose source was reviewed (`fail-closed`).

`versions.py` compares it with the reviewed manifests. A source that differs from all of them in any symbol that the
adapter hooks or calls ends the start with one sentence. `python -m sglang_april.adapter.review` reviews another one.
"""

import argparse
import importlib.util

from sglang_april.adapter import versions
from sglang_april.adapter.versions import HookTable, PreflightError


def check() -> None:
    """Check that every symbol in use was reviewed.

    Raises:
        PreflightError: a symbol is missing, changed or was never reviewed.
    """
    check_kernels_package()
    manifest = versions.installed()
    for path in symbols_in_use(versions.hook_table()):
        if path not in manifest["symbols"]:
            raise PreflightError(f"{path} is not in the reviewed manifest of SGLang {manifest['sglang']}")


def check_kernels_package() -> None:
    """Raise PreflightError if a folder hides Hugging Face's package `kernels`, which SGLang imports."""
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin is None:  # a folder without __init__.py, such as a checkout's
        place = ", ".join(spec.submodule_search_locations or [])
        raise PreflightError(f"the folder {place} hides the package kernels that SGLang imports")


def symbols_in_use(table: HookTable) -> list[str]:
    """Every dotted path that an adapter hooks or calls, once."""
    return list(dict.fromkeys([*(path for hook in table.HOOKS for path in hook.paths), *table.DEPENDS_ON]))


def main() -> None:
    """Check the installed SGLang, or list the hooks."""
    parser = argparse.ArgumentParser(prog="python -m sglang_april.adapter.preflight", description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="print every hook with its reason and upstream link")
    options = parser.parse_args()
    try:
        check()
        if options.list:
            _list_hooks()
        else:
            print(f"the installed SGLang is the reviewed {versions.installed()['sglang']}")  # noqa: T201
    except PreflightError as error:
        raise SystemExit(f"sglang-april: {error}") from error


def _list_hooks() -> None:
    manifest = versions.installed()
    for hook in versions.hook_table().HOOKS:
        print(f"{hook.kind} → {hook.handler}: {hook.why} (remove when {hook.remove_when})")  # noqa: T201
        for path in hook.paths:
            print(f"    {path}\n    {versions.upstream_link(manifest, path)}")  # noqa: T201


if __name__ == "__main__":
    main()
