"""An unexpected exception of the plugin in a scheduler process ends the whole server (`fail-stop`).

The state of one rank may then differ from that of the others and from SGLang's, so nothing may be decided from it any
more, and nothing of the interrupted step may be written. `end` therefore does not unwind: SGLang catches exceptions in
places, and threads would keep running. The process ends at once, after SGLang's own signal to its parent, which kills
the process tree and closes every connection. What the journal has written is delivered by the next server.
"""

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from sglang_april.adapter.hook import Hook

log = logging.getLogger("sglang_april")

THREADS = "april-"
"""Prefix of the names of the plugin's threads."""


class _Rank:
    """The rank of this process if it is a scheduler. In other processes, SGLang handles exceptions."""

    number: int | None = None


def arm(rank: int) -> None:
    """Make every later unexpected exception of the plugin end the server. Called when a scheduler is attached."""
    _Rank.number = rank
    threading.excepthook = _thread_ended


def end(where: str, error: BaseException) -> NoReturn:
    """End the server with one sentence; the log has the traceback.

    Args:
        where: the handler or thread in which the exception occurred.
    """
    log.critical(
        "sglang-april: the server ends, because rank %s raised %r in %s.", _Rank.number, error, where, exc_info=error
    )
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        os.kill(parent.pid, signal.SIGQUIT)
    os._exit(1)


def ends_server(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for functions that SGLang calls directly, not through a hook: an exception ends the server."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # noqa: BLE001
            end(function.__name__.strip("_"), error)

    return call


class IntendedError(RuntimeError):
    """What a handler raises on purpose, on all ranks, through SGLang's function to another handler."""


def handler_failed(row: Hook, error: Exception, stock: Callable[..., Any] | None = None) -> None:
    """End the server because the handler of a hook raised; return where the exception is left to SGLang.

    Args:
        stock: SGLang's function around which the handler is. What it raised itself is left to SGLang.
    """
    if _Rank.number is None or isinstance(error, IntendedError) or (stock is not None and _left(stock, error)):
        return
    end(row.handler.partition(":")[2], error)


def _left(function: Callable[..., Any], error: Exception) -> bool:
    """Whether an exception left a function: a frame of it is in the traceback.

    Functions that one `def` makes share their code; their closures distinguish them.
    """
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    closure = dict(zip(code.co_freevars, cells, strict=True)) if code is not None else {}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_code is code and all(frame.f_locals.get(name) is cell.cell_contents for name, cell in closure.items())
        for frame in frames
    )


def _thread_ended(failed: threading.ExceptHookArgs) -> None:
    name = failed.thread.name if failed.thread is not None else ""
    if name.startswith(THREADS) and failed.exc_value is not None:
        end(f"thread {name}", failed.exc_value)
    threading.__excepthook__(failed)
