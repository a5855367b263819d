"""Applies the table of targets to SGLang, and makes sure that every hook is really there.

SGLang's loader logs what goes wrong and serves without it. Here a hook that is missing ends the process.
"""

import functools
import importlib.metadata
import os
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sglang_april
from sglang_april.adapter.hook import Hook
from sglang_april.adapter.v0_5_17.hook_table import TARGETS


class HookError(RuntimeError):
    """A hook that is not where it should be; the message is one sentence."""


_applied: dict[str, list[tuple[Hook, Callable[..., Any]]]] = {}
_verified: list[str] = []


def apply() -> None:
    """Register every row with SGLang, and have the result checked as soon as SGLang has applied it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in TARGETS:
        hook = _lazy(target.handler)
        HookRegistry.register(target.path, hook, HookType(target.kind))
        _applied.setdefault(target.path, []).append((target, hook))

    upstream_apply: Callable[[], None] = HookRegistry.apply_hooks

    # SGLang logs a hook that cannot be applied and goes on, so whoever applies hooks must meet our check behind it.
    @functools.wraps(upstream_apply)
    def apply_and_verify() -> None:
        with _methods_found_at_once():
            upstream_apply()
        try:
            verify()
        except HookError as error:
            raise SystemExit(f"sglang-april: {error}") from error

    HookRegistry.apply_hooks = apply_and_verify


def verify() -> None:
    """Assert that every row is really in the call chain of its target in this process."""
    for path, rows in _applied.items():
        reachable = _hooks_in_chain(path)
        for target, hook in rows:
            if hook not in reachable:
                raise HookError(f"the {target.kind} hook on {path} is not in place, so partial rollouts would not work")
    _verified[:] = [f"{target.path} [{target.kind}]" for target in TARGETS]


def hook_report() -> dict[str, Any]:
    """What runs in this process: versions and the verified hooks; empty where nothing was applied."""
    if not _verified:
        return {}
    versions = {"april": sglang_april.__version__, "sglang": importlib.metadata.version("sglang")}
    return {**versions, "pid": os.getpid(), "hooks": list(_verified)}


@contextmanager
def _methods_found_at_once() -> Iterator[None]:
    """Spare the search through all modules for copies of a hooked method: a quarter of a second each, in every process.

    SGLang searches because `from module import function` makes copies; nobody imports a method that way.
    """
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch

    def search_for_functions(original: Any, wrapped: Any, owner: Any) -> int:
        return 0 if isinstance(owner, type) else search(original, wrapped, owner)

    hook_registry._propagate_patch = search_for_functions
    try:
        yield
    finally:
        hook_registry._propagate_patch = search


def _lazy(handler: str) -> Callable[..., Any]:
    """A stand-in that imports its handler on the first call: most handlers need modules that one process only has."""

    @functools.cache
    def resolve() -> Callable[..., Any]:
        return pkgutil.resolve_name(handler)

    def call(*args: Any, **kwargs: Any) -> Any:
        return resolve()(*args, **kwargs)

    call.__qualname__ = handler
    return call


def _hooks_in_chain(path: str) -> list[Any]:
    """All callables that the wrappers around a target hold, from the outermost to the original."""
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise HookError(f"the hook target {path} does not exist in this SGLang ({error})") from error
    function = getattr(function, "__func__", function)
    held: list[Any] = []
    while function is not None:
        held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        function = getattr(function, "__wrapped__", None)
    return held
