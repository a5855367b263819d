"""What an SGLang source tree can be configured with, and which KV pools it has, read from its text.

Fields and variables that SGLang creates at run time are not found here. The start still refuses them by name if they
are set, because arguments, variables and pools are allowed by list.
"""

import ast
from pathlib import Path

from sglang_april.adapter import source_tree

ARGUMENTS = "sglang.srt.server_args.ServerArgs"
NAMESPACES = "sglang/srt/arg_groups/fields"
VARIABLES = "sglang.srt.environ.Envs"
POOLS = "sglang/srt/mem_cache"
POOL = "KVCache"


def arguments(root: Path) -> dict[str, str]:
    """The fields of ServerArgs with the source of their defaults; empty for one without."""
    fields = [item for item in _argument_nodes(root) if isinstance(item, ast.AnnAssign)]
    return {
        item.target.id: ast.unparse(item.value) if item.value else ""
        for item in fields
        if isinstance(item.target, ast.Name) and not ast.unparse(item.annotation).startswith("ClassVar")
    }


def _argument_nodes(root: Path) -> list[ast.stmt]:
    """The bodies of ServerArgs and of the namespaces that 0.5.23 builds it from."""
    nodes = list(_body(ARGUMENTS, root))
    for file in sorted((root / NAMESPACES).glob("*.py")):
        for node in source_tree.parse(file).body:
            nodes += node.body if isinstance(node, ast.ClassDef) else []
    return nodes


def variables(root: Path) -> dict[str, str]:
    """The environment variables that SGLang declares, with the source of their type and default."""
    found = {}
    for item in _body(VARIABLES, root):
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.Call) and isinstance(item.targets[0], ast.Name):
            found[item.targets[0].id] = ast.unparse(item.value)
    return found


def pools(root: Path) -> set[str]:
    """Names of the KV pools: all classes of `mem_cache` below KVCache that are not abstract themselves."""
    classes: dict[str, ast.ClassDef] = {}
    for file in sorted((root / POOLS).glob("*.py")):
        classes |= {node.name: node for node in source_tree.parse(file).body if isinstance(node, ast.ClassDef)}
    return {name for name, node in classes.items() if _is_pool(name, classes) and not _is_abstract(node)}


def _is_pool(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    bases = [ast.unparse(base).rpartition(".")[2] for base in classes[name].bases] if name in classes else []
    return any(base == POOL or _is_pool(base, classes) for base in bases)


def _is_abstract(node: ast.ClassDef) -> bool:
    names = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    marks = [ast.unparse(mark) for method in methods for mark in method.decorator_list]
    return "ABC" in names or any(mark.endswith("abstractmethod") for mark in marks)


def _body(path: str, root: Path) -> list[ast.stmt]:
    found = source_tree.find(path, root)
    return found[1].body if found is not None else []
