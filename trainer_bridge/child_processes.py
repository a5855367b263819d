"""Processes of this trainer on this machine that are killed with it: ranks, and workers of rewards and agents.

The worker processes import this module, so it must not import anything heavy.
"""

import atexit
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

END_TIMEOUT_S = 5.0

_workers: "weakref.WeakSet[BaseProcess]" = weakref.WeakSet()
"""Workers that have not been killed."""


def push_folder_prefix(pid: int | None) -> str:
    """Beginning of the name of a process's temporary folder. Several machines may share the folder of all of them."""
    return f"april-push-{socket.gethostname()}-{pid}-"


def start_worker(main: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start `main(connection, *arguments)` in a process, and return the other end of the connection.

    The process may start others, which end with it: all of them are a process group.
    """
    from sglang_april import interrupt

    context = multiprocessing.get_context("spawn")
    connection, child_end = context.Pipe()
    process = context.Process(target=_run_worker, args=(main, child_end, arguments), daemon=True)
    with interrupt.sigint_blocked():
        process.start()
    child_end.close()
    _workers.add(process)
    return process, connection


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kill them, with the processes of workers. Delete the policy that one of them was pushing through a folder, which
    it cannot do any more."""
    for process in processes:
        if process in _workers and process.pid is not None:
            _workers.discard(process)
            with suppress(ProcessLookupError):  # it is not the leader of a group yet
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    for process in processes:
        process.join(END_TIMEOUT_S)
        for folder in Path(tempfile.gettempdir()).glob(f"{push_folder_prefix(process.pid)}*"):
            shutil.rmtree(folder, ignore_errors=True)


@atexit.register
def _kill_workers() -> None:
    kill(list(_workers))


def _run_worker(main: Callable[..., None], connection: Connection, arguments: Sequence[Any]) -> None:
    os.setpgid(0, 0)
    multiprocessing.current_process().daemon = False  # a daemonic process may not start others
    multiprocessing.set_start_method(None, force=True)  # the system's, not that of this process
    os.register_at_fork(after_in_child=connection.close)  # the trainer notices the end of this process by it
    threading.Thread(target=_end_with_trainer, daemon=True).start()
    main(connection, *arguments)


def _end_with_trainer() -> None:
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    os.killpg(0, signal.SIGKILL)
