"""Describes symbols of an SGLang source tree from its text, without importing it.

A symbol is described by its kind, its signature (of a class: its fields) and a digest of its normalized body: comments,
docstrings and formatting do not count, and the digest is equal for every Python version. A `root` is the folder that
contains the package `sglang`.
"""

import ast
import copy
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

Symbol = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

ASPECTS = ("kind", "signature", "body")
"""The parts of a symbol whose change requires a review."""


def describe(path: str, root: Path) -> dict[str, Any] | None:
    """File, line, kind, signature and digest of the body of one symbol; None if it does not exist."""
    found = find(path, root)
    if found is None:
        return None
    file, node = found
    return {"file": file, "line": node.lineno, **fingerprint(node)}


def find(path: str, root: Path) -> tuple[str, Symbol] | None:
    """The source file of a dotted path, relative to the root, and its syntax tree; None if it does not exist."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        base = Path(*parts[:length])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if (root / file).is_file():
                node = _find(parse(root / file), parts[length:])
                return (file.as_posix(), node) if node is not None else None
    return None


def fingerprint(node: Symbol) -> dict[str, Any]:
    """Kind, signature and digest of the body of a symbol."""
    if isinstance(node, ast.ClassDef):
        fields = [ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign)]
        return {"kind": "class", "signature": fields, "body": _digest([*node.bases, *node.decorator_list])}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return {
        "kind": "async def" if isinstance(node, ast.AsyncFunctionDef) else "def",
        "signature": f"({ast.unparse(node.args)}){returns}",
        "body": _digest([*node.decorator_list, *_without_docstring(node.body)]),
    }


def text_of(path: str, root: Path) -> str:
    """The normalized text of a symbol, of a class without its methods; empty if it does not exist."""
    found = find(path, root)
    if found is None:
        return ""
    node = found[1]
    if isinstance(node, ast.ClassDef):
        body: list[ast.stmt] = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    else:
        body = _without_docstring(node.body)
    shown = copy.copy(node)
    shown.body = body or [ast.Pass()]
    return ast.unparse(shown)


@cache
def parse(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def digest_of_file(file: Path) -> str:
    """SHA-256 of a file; empty if it does not exist."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _find(tree: ast.Module, names: list[str]) -> Symbol | None:
    scope: ast.Module | Symbol = tree
    for name in names:
        found = [node for node in scope.body if isinstance(node, Symbol) and node.name == name]
        if not found:
            return None
        scope = found[-1]
    return scope if isinstance(scope, Symbol) else None


def _digest(nodes: Iterable[ast.AST]) -> str:
    text = "\n".join(token for node in nodes for token in _tokens(node))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tokens(value: Any) -> Iterator[str]:
    """The syntax tree as text: without positions and empty fields."""
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
