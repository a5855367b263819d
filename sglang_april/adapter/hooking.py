"""Applies the hook table to SGLang and verifies that every hook is in place (`fail-closed`).

SGLang's plugin loader logs errors and serves without the plugin. Here a missing hook ends the process.
"""

import functools
import os
import pkgutil
from collections.abc import Callable
from typing import Any

import sglang_april
from sglang_april import config
from sglang_april.adapter import fail_stop, versions
from sglang_april.adapter.hook import Hook

Handler = Callable[..., Any]


class HookError(RuntimeError):
    """A hook that is not in place. The message is one sentence."""


_applied: list[tuple[str, str, Handler]] = []
"""(path, kind, handler) of every hook, in the order of the table."""
_verified: list[str] = []
_disabled: list[bool] = []
"""Not empty if this process runs a plain SGLang server."""


def apply() -> None:
    """Register every hook with SGLang, and verify the result as soon as SGLang has applied it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for row in versions.hook_table().HOOKS:
        handler = _lazy(versions.CORE, row)
        for path in row.paths:
            HookRegistry.register(path, handler, HookType(row.kind))
            _applied.append((path, row.kind, handler))

    upstream_apply: Callable[[], None] = HookRegistry.apply_hooks

    # SGLang logs a hook that it cannot apply and continues, so every application of hooks is followed by this check.
    @functools.wraps(upstream_apply)
    def apply_and_verify() -> None:
        with versions.start().applying_hooks():
            upstream_apply()
        try:
            verify()
        except HookError as error:
            raise SystemExit(f"sglang-april: {error}") from error

    HookRegistry.apply_hooks = apply_and_verify


def disable() -> None:
    """Turn off all handlers here and in child processes started later: the server is plain SGLang."""
    _disabled.append(True)
    os.environ.pop(config.ENV, None)


def verify() -> None:
    """Check that every handler is in the call chain of its target in this process.

    Raises:
        HookError: a handler is missing.
    """
    reachable = {path: _handlers_in_chain(path) for path, _, _ in _applied}
    for path, kind, handler in _applied:
        if handler not in reachable[path]:
            raise HookError(f"the {kind} hook on {path} is not in place, so partial rollouts would not work")
    _verified[:] = [f"{path} [{kind}]" for path, kind, _ in _applied]


def hook_report() -> dict[str, Any]:
    """Versions (of SGLang: the reviewed source), process id and verified hooks; empty if no hooks were applied."""
    if not _verified:
        return {}
    installed = {
        "april": sglang_april.__version__,
        "protocol": sglang_april.PROTOCOL,
        "sglang": versions.installed()["sglang"],
    }
    return {**installed, "pid": os.getpid(), "hooks": list(_verified)}


def _lazy(package: str, row: Hook) -> Callable[..., Any]:
    """A handler that imports its module on the first call: most handlers need modules of one process only.

    In a scheduler process, an exception of the handler ends the server (`fail-stop`).
    """
    path = f"{package}.{row.handler}"

    @functools.cache
    def resolve() -> Callable[..., Any]:
        return pkgutil.resolve_name(path)

    # Several of these run in every step: each calls its handler directly, and examines exceptions when there is one.

    def beside(*args: Any, **kwargs: Any) -> Any:
        if _disabled:
            return None
        try:
            return resolve()(*args, **kwargs)
        except Exception as error:
            fail_stop.handler_failed(row, error)
            raise

    def around(stock: Handler, *args: Any, **kwargs: Any) -> Any:
        if _disabled:
            return stock(*args, **kwargs)
        try:
            return resolve()(stock, *args, **kwargs)
        except Exception as error:
            fail_stop.handler_failed(row, error, stock)
            raise

    call = around if row.kind == "around" else beside
    call.__qualname__ = path
    return call


def _handlers_in_chain(path: str) -> list[Any]:
    """The callables held by the wrappers around a target, from the outermost to the original."""
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
