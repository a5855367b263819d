"""Ctrl-C in the long commands of `bench` and `examples`: one line, and exit status 130."""

import os
import signal
import sys
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn


def while_importing() -> None:
    """End Ctrl-C before `run`, while a command's modules are imported, with one line as well."""
    sys.excepthook = _one_line


def _one_line(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        _exit("nothing was started")
    sys.__excepthook__(kind, error, where)


def run(command: Callable[[], int | None], kept: str) -> NoReturn:
    """Exit with the status of `command` (None: 0); after SIGINT or SIGTERM with 130, and `kept` on stderr.

    Contexts of `command` are left as usual, so servers end. Threads that still wait do not delay the exit.

    Args:
        kept: what remains of an interrupted command, and how to continue.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        status = command()
    except KeyboardInterrupt:
        _exit(kept)
    sys.exit(status)


def _exit(kept: str) -> NoReturn:
    print(f"\ninterrupted: {kept}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)
