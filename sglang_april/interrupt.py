"""Ctrl-C: a server ends with exit status 130 and one line that names what is kept."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

from sglang_april import config

STATUS = 128 + signal.SIGINT


class Interruptions:
    """Whether this process handles Ctrl-C: a server does; a program that embeds SGLang's engine does so itself."""

    handled = False


def handle() -> None:
    """Handle Ctrl-C in this process from now on, if it is called in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupted)
        Interruptions.handled = True


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in the processes that it starts: a terminal sends Ctrl-C to all of them."""
    resource_tracker.ensure_running()  # multiprocessing would start it later, and then unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def what_is_kept(settings: config.AprilConfig) -> str:
    """One sentence on what remains of the runs, and how to continue them."""
    if settings.journal is None:
        return "Nothing is kept; with --april-journal FILE, the same command would continue all runs."
    stored = f", and {settings.disk_dir} the KV that was stored in time" if settings.disk_dir else ""
    return f"The journal {settings.journal} keeps all runs{stored}; the same command continues them."


def say_what_is_kept() -> None:
    """Print what is kept to stderr."""
    sys.stderr.write(f"\nsglang-april: interrupted. {what_is_kept(config.load())}\n")
    sys.stderr.flush()


def _interrupted(_number: int, _frame: FrameType | None) -> NoReturn:
    """Ctrl-C before the server serves, when no run has anything to store."""
    import psutil  # of SGLang's; the plugin's other processes need none

    say_what_is_kept()
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(STATUS)
