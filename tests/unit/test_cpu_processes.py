"""sglang_april.cpu.processes: when SGLang's processes are forks."""

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, threading
from sglang_april.cpu import processes
multiprocessing.set_start_method("spawn", force=True)
{before}
processes.fork(None, None)
print(multiprocessing.get_start_method())
"""
IN_PYTHON = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
IN_A_LIBRARY = """
import ctypes
libc, ended = ctypes.CDLL(None), ctypes.c_ulong()
libc.pthread_create(ctypes.byref(ended), None, libc.pause, None)
libc.pthread_setname_np(ended, b"grpc_global_tim")
"""


@pytest.mark.parametrize(
    ("before", "method"),
    [("", "fork"), (IN_PYTHON, "spawn"), (IN_A_LIBRARY, "spawn")],
    ids=["alone", "a thread in Python", "a thread of a library"],
)
def test_processes_are_forks_unless_another_thread_may_hold_a_lock(before: str, method: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(before=before) + "import os, sys; sys.stdout.flush(); os._exit(0)"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [method]
