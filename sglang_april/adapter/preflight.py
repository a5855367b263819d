"""Before anything is hooked: compare the installed SGLang with the release that was reviewed (`fail-closed`).

For each supported release, `fingerprints/<version>.json` holds what a person reviewed: the signature and the digest of
the normalized body of every symbol that the adapter hooks or calls, and the digest of its file. Equal files need no
parsing, so the check takes milliseconds; in a file that differs, each symbol is compared by its syntax tree. Any change
ends the start with one sentence. After reviewing a new release: `python -m sglang_april.adapter.preflight --write`.
"""

import argparse
import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sglang_april.adapter import versions
from sglang_april.adapter.versions import HookTable, Manifest, PreflightError

Symbol = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def check() -> None:
    """Compare every symbol in use with its reviewed version.

    Raises:
        PreflightError: a symbol is missing, changed or was never reviewed, or the release is not supported.
    """
    check_kernels_package()
    manifest = versions.reviewed_manifest(versions.sglang_version())
    required = symbols_in_use(versions.hook_table())
    for path in required:
        if path not in manifest["symbols"]:
            raise PreflightError(f"{path} is not in the reviewed manifest of SGLang {manifest['sglang']}")
    root = versions.sglang_root()
    for file, digest in manifest["files"].items():
        paths = [path for path in required if manifest["symbols"][path]["file"] == file]
        if paths and _digest_of_file(root / file) != digest:
            _compare_symbols(root / file, paths, manifest)


def check_kernels_package() -> None:
    """Raise PreflightError if a folder hides Hugging Face's package `kernels`, which SGLang imports."""
    spec = importlib.util.find_spec("kernels")
    if spec is not None and spec.origin is None:  # a folder without __init__.py, such as a checkout's
        place = ", ".join(spec.submodule_search_locations or [])
        raise PreflightError(f"the folder {place} hides the package kernels that SGLang imports")


def symbols_in_use(table: HookTable) -> list[str]:
    """Every dotted path that an adapter hooks or calls, once."""
    return list(dict.fromkeys([*(path for hook in table.HOOKS for path in hook.paths), *table.DEPENDS_ON]))


def build_manifest(version: str, adapter: str, root: Path, paths: Iterable[str]) -> Manifest:
    """Describe the symbols in the SGLang tree at `root`."""
    symbols = {path: describe(path, root) for path in paths}
    files = {entry["file"] for entry in symbols.values()}
    return {
        "sglang": version,
        "adapter": adapter,
        "source": f"https://github.com/sgl-project/sglang/blob/v{version}/python/",
        "files": {file: _digest_of_file(root / file) for file in sorted(files)},
        "symbols": dict(sorted(symbols.items())),
    }


def describe(path: str, root: Path) -> dict[str, Any]:
    """File, line, kind, signature (of a class: its fields) and digest of the body of one symbol."""
    file, names = locate(path, root)
    node = _find(_parse(root / file), names)
    if node is None:
        raise PreflightError(f"{path} does not exist in SGLang {versions.sglang_version()}")
    return {"file": file, "line": node.lineno, **fingerprint(node)}


def locate(path: str, root: Path) -> tuple[str, list[str]]:
    """Split a dotted path into a source file and the names inside it."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = Path(*parts[:length])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if (root / file).is_file():
                return file.as_posix(), parts[length:]
    raise PreflightError(f"{path} does not exist in SGLang {versions.sglang_version()}")


def fingerprint(node: Symbol) -> dict[str, Any]:
    """The parts of a symbol whose change requires a review."""
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
        return {"kind": "class", "signature": fields, "body": _digest([*node.bases, *node.decorator_list])}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return {
        "kind": "async def" if isinstance(node, ast.AsyncFunctionDef) else "def",
        "signature": f"({ast.unparse(node.args)}){returns}",
        "body": _digest([*node.decorator_list, *_without_docstring(node.body)]),
    }


def _compare_symbols(file: Path, paths: list[str], manifest: Manifest) -> None:
    if not file.is_file():
        raise PreflightError(f"{paths[0]} does not exist in the installed SGLang {manifest['sglang']}")
    tree = _parse(file)
    for path in paths:
        reviewed = manifest["symbols"][path]
        node = _find(tree, locate(path, versions.sglang_root())[1])
        if node is None:
            raise PreflightError(f"{path} does not exist in the installed SGLang {manifest['sglang']}")
        current = fingerprint(node)
        for aspect in ("kind", "signature", "body"):
            if current[aspect] != reviewed[aspect]:
                raise PreflightError(f"the {aspect} of {path} is not the one reviewed for SGLang {manifest['sglang']}")


def _find(tree: ast.Module, names: list[str]) -> Symbol | None:
    scope: ast.Module | Symbol = tree
    for name in names:
        found = [node for node in scope.body if isinstance(node, Symbol) and node.name == name]
        if not found:
            return None
        scope = found[-1]
    return scope if isinstance(scope, Symbol) else None


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _digest_of_file(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _digest(nodes: Iterable[ast.AST]) -> str:
    text = "\n".join(token for node in nodes for token in _tokens(node))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tokens(value: Any) -> Iterator[str]:
    """The syntax tree as text that is equal for every Python version: without positions and empty fields."""
    if isinstance(value, ast.AST):
        yield type(value).__name__
        for name, child in ast.iter_fields(value):
            if child not in (None, []) and name not in ("kind", "type_comment", "ctx"):
                yield name
                yield from _tokens(child)
    elif isinstance(value, list):
        for child in value:
            yield from _tokens(child)
    else:
        yield repr(value)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def main() -> None:
    """Check the installed SGLang, list the hooks, or write a manifest for review."""
    parser = argparse.ArgumentParser(prog="python -m sglang_april.adapter.preflight", description=main.__doc__)
    parser.add_argument("--list", action="store_true", help="print every hook with its reason and upstream link")
    parser.add_argument("--write", action="store_true", help="write the manifest of the installed SGLang")
    parser.add_argument("--adapter", help="with --write: adapter package for a release without a manifest")
    options = parser.parse_args()
    if options.list:
        _list_hooks()
    elif options.write:
        _write_manifest(options.adapter)
    else:
        check()


def _list_hooks() -> None:
    manifest = versions.reviewed_manifest(versions.sglang_version())
    for hook in versions.hook_table().HOOKS:
        print(f"{hook.kind} → {hook.handler}: {hook.why} (remove when {hook.remove_when})")  # noqa: T201
        for path in hook.paths:
            print(f"    {path}\n    {versions.upstream_link(manifest, path)}")  # noqa: T201


def _write_manifest(adapter: str | None) -> None:
    version = versions.sglang_version()
    adapter = adapter or versions.adapter_package()
    paths = symbols_in_use(versions.load_hook_table(adapter))
    manifest = build_manifest(version, adapter, versions.sglang_root(), paths)
    (versions.FINGERPRINTS / f"{version}.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
