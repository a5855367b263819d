"""Processes of this trainer on this machine that are killed with it: ranks, and workers of rewards."""

import shutil
import socket
import tempfile
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

END_TIMEOUT_S = 5.0


def push_folder_prefix(pid: int | None) -> str:
    """Beginning of the name of a process's temporary folder. Several machines may share the folder of all of them."""
    return f"april-push-{socket.gethostname()}-{pid}-"


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kill them, and delete the policy that one of them was pushing through a folder, which it cannot do any more."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join(END_TIMEOUT_S)
        for folder in Path(tempfile.gettempdir()).glob(f"{push_folder_prefix(process.pid)}*"):
            shutil.rmtree(folder, ignore_errors=True)
