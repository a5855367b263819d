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


def run_handler(row: Hook, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the handler of a hook. What SGLang's own function raises inside an `around` handler is left to SGLang."""
    stock = _Stock(args[0]) if row.kind == "around" else None
    try:
        return handler(*((stock, *args[1:]) if stock is not None else args), **kwargs)
    except Exception as error:
        if _Rank.number is None or isinstance(error, IntendedError) or (stock is not None and error is stock.error):
            raise
        end(row.handler.partition(":")[2], error)


class _Stock:
    """SGLang's function as an `around` handler calls it; records the exception that it raised."""

    __slots__ = ("_function", "error")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise


def _thread_ended(failed: threading.ExceptHookArgs) -> None:
    name = failed.thread.name if failed.thread is not None else ""
    if name.startswith(THREADS) and failed.exc_value is not None:
        end(f"thread {name}", failed.exc_value)
    threading.__excepthook__(failed)
