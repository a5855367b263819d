"""Before anything is hooked: is this the SGLang that was reviewed, and can it work here?

For each supported release, `fingerprints/<version>.json` holds what a person looked at: the signature and the
normalised body of every symbol that we hook or call, and the digest of its file. Equal files need no parsing, so the
check costs milliseconds; in a file that differs, each symbol is compared by its syntax tree. What changed ends the
start with one sentence. After reviewing a new release: `python -m sglang_april.adapter.preflight --write`.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from sglang_april.adapter.v0_5_17 import hook_table

FINGERPRINTS = Path(__file__).parent / "fingerprints"
REPOSITORY = Path(__file__).parents[2]

Manifest = dict[str, Any]
Symbol = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class PreflightError(RuntimeError):
    """Why this server must not start, in one sentence."""


def check() -> None:
    """Stop unless everything that we build on is as it was reviewed."""
    check_kernels_package()
    manifest = reviewed_manifest(sglang_version())
    required = symbols_in_use()
    for path in required:
        if path not in manifest["symbols"]:
            raise PreflightError(f"{path} is not in the reviewed manifest of SGLang {manifest['sglang']}")
    root = sglang_root()
    for file, digest in manifest["files"].items():
        paths = [path for path in required if manifest["symbols"][path]["file"] == file]
        if paths and _digest_of_file(root / file) != digest:
            _compare_symbols(root / file, paths, manifest)


def check_kernels_package() -> None:
    """SGLang imports Hugging Face's `kernels`; a folder of that name before it would silently change its kernels."""
    spec = importlib.util.find_spec("kernels")
    if spec is None:
        return
    if spec.origin is None or Path(spec.origin).is_relative_to(REPOSITORY / "kernels"):
        place = spec.origin or ", ".join(spec.submodule_search_locations or [])
        raise PreflightError(f"the folder {place} hides the package kernels that SGLang imports")


def sglang_version() -> str:
    """The release of SGLang that is installed; asking its metadata avoids importing it."""
    return importlib.metadata.version("sglang")


def sglang_root() -> Path:
    """The folder above the package `sglang`."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PreflightError("SGLang is not installed")
    return Path(spec.submodule_search_locations[0]).parent


def supported_versions() -> list[str]:
    """The releases that have a reviewed manifest."""
    return sorted(file.stem for file in FINGERPRINTS.glob("*.json"))


def reviewed_manifest(version: str) -> Manifest:
    """The manifest of a release, or an error that says which are supported."""
    file = FINGERPRINTS / f"{version}.json"
    if not file.is_file():
        raise PreflightError(f"SGLang {version} is not supported, only {', '.join(supported_versions())}")
    manifest: Manifest = json.loads(file.read_text())
    return manifest


def symbols_in_use() -> list[str]:
    """Every dotted path that we hook or call, once."""
    return list(dict.fromkeys([target.path for target in hook_table.TARGETS] + list(hook_table.DEPENDS_ON)))


def build_manifest(version: str, root: Path, paths: Iterable[str]) -> Manifest:
    """Describe the symbols as they are in this SGLang."""
    symbols = {path: describe(path, root) for path in paths}
    files = {entry["file"] for entry in symbols.values()}
    return {
        "sglang": version,
        "files": {file: _digest_of_file(root / file) for file in sorted(files)},
        "symbols": dict(sorted(symbols.items())),
    }


def describe(path: str, root: Path) -> dict[str, Any]:
    """File, kind, signature (of a class: its fields) and digest of the body of one symbol."""
    file, names = locate(path, root)
    node = _find(_parse(root / file), names)
    if node is None:
        raise PreflightError(f"{path} does not exist in SGLang {sglang_version()}")
    return {"file": file, **fingerprint(node)}


def locate(path: str, root: Path) -> tuple[str, list[str]]:
    """Split a dotted path into a source file and the names inside it."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = Path(*parts[:length])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if (root / file).is_file():
                return file.as_posix(), parts[length:]
    raise PreflightError(f"{path} does not exist in SGLang {sglang_version()}")


def fingerprint(node: Symbol) -> dict[str, Any]:
    """What of a symbol must not change unseen."""
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
        node = _find(tree, locate(path, sglang_root())[1])
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
    """The syntax tree as text that is the same for every Python version: positions and empty fields left out."""
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
    """Check, or write the manifest of the installed SGLang for a person to review."""
    parser = argparse.ArgumentParser(prog="python -m sglang_april.adapter.preflight", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the manifest of the installed SGLang")
    if not parser.parse_args().write:
        check()
        return
    version = sglang_version()
    manifest = build_manifest(version, sglang_root(), symbols_in_use())
    (FINGERPRINTS / f"{version}.json").write_text(json.dumps(manifest, indent=2) + "\n")


if __name__ == "__main__":
    main()
