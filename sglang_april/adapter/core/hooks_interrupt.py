"""Handlers of the hooks around Ctrl-C (`hook_table.py`), in the HTTP process."""

import signal
from collections.abc import Callable
from typing import Any

from sglang_april import interrupt


def handle(*_: Any, **__: Any) -> None:
    """BEFORE `http_server.launch_server`."""
    interrupt.handle()


def start_processes(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND `Engine._launch_*`, which start processes."""
    with interrupt.sigint_blocked():
        return original(*args, **kwargs)


def handle_while_serving(_result: Any, manager: Any) -> None:
    """AFTER `TokenizerManager.auto_create_handle_loop`, which handles SIGTERM; uvicorn has replaced `handle`."""
    shutdown = manager.april_shutdown  # SGLang calls `auto_create_handle_loop` for every request
    if interrupt.Interruptions.handled and not shutdown.handles_sigint:
        manager.event_loop.add_signal_handler(signal.SIGINT, shutdown.interrupted)
        shutdown.handles_sigint = True
