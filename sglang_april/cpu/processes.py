"""Scheduler and detokenizer as forks of the HTTP process, which has imported SGLang already.

SGLang spawns them, because CUDA cannot be used in a fork. Each then imports SGLang again, 15 to 20 s of CPU time: most
of a server's start.
"""

import gc
import multiprocessing
import threading
from pathlib import Path
from typing import Any

TARGET = "sglang.srt.entrypoints.engine._set_envs_and_config"
"""SGLang's function that selects `spawn`."""
SAFE_THREADS = {"jemalloc_bg_thd"}
"""Threads of libraries that handle forks; those of OpenBLAS have the process's name."""


def fork(_: None, _server_args: Any) -> None:
    """AFTER `_set_envs_and_config`."""
    if may_fork():
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page of what was imported
        multiprocessing.set_start_method("fork", force=True)


def may_fork() -> bool:
    """Whether no other thread can hold a lock, which would stay held in a fork: a program that embeds SGLang may have
    threads."""
    name = Path("/proc/self/comm").read_text().strip()
    return threading.active_count() == 1 and thread_names() <= {name, *SAFE_THREADS}


def thread_names() -> set[str]:
    """Names of this process's threads, those of its libraries included."""
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
