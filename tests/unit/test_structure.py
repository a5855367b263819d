"""The structure of the packages: no import cycles, and one class name for one concept."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang_april", "trainer_bridge", "bench", "examples", "kernels/april_kernels")
SHARED_NAMES = {
    "AgentLoopManager": "what verl loads, for each of its two kinds of trainer",
    "ConfigError": "a refused configuration, of the plugin and of the trainer",
    "Engine": "a class of the fake SGLang, whose name is the release's",
    "Event": "a test's stand-in has the name of the class that it replaces",
    "ServerError": "a server of a benchmark or of the demo that does not start",
    "Stream": "a test's stand-in has the name of the class that it replaces",
}
"""Names of several classes, with the meaning that they share."""


def modules() -> dict[str, Path]:
    """Every module by its name."""
    found = {}
    for package in map(ROOT.joinpath, PACKAGES):
        for path in package.rglob("*.py"):
            name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Pairs (module, name) of what is imported when a module is; not inside functions, and not for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            yield from ((child.module or "", alias.name) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            yield from imports(child)


def test_modules_have_no_import_cycles() -> None:
    known = modules()
    assert len(known) > 200
    graph = {}
    for name, path in known.items():
        found = {
            inner if (inner := f"{module}.{imported}") in known else module
            for module, imported in imports(ast.parse(path.read_text()))
        }
        graph[name] = (found & known.keys()) - {name}
    assert "sglang_april.http.rounds" in graph["sglang_april.http.service"], "the imports are found"
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_classes_have_names_of_their_own() -> None:
    """Also those of tests, and private ones: one name has one meaning in the repository."""
    places = defaultdict(set)
    for package in map(ROOT.joinpath, (*PACKAGES, "tests")):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].add(str(path.relative_to(ROOT)))
    shared = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert shared.keys() == SHARED_NAMES.keys(), shared.keys() ^ SHARED_NAMES.keys()
