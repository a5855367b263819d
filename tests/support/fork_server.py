"""Starts test servers as forks of a process that has imported SGLang, which saves the import.

Importing SGLang three times (HTTP process, scheduler, detokenizer) takes most of a server's start. A fork is its own
session and runs the test server's main from the start; plugins are loaded and hooks applied there. The CPU platform
forks scheduler and detokenizer, so that they need no import either. They remain members of the process group, so
kill -9 of the group ends the whole server.

    python -m tests.support.fork_server        # started by `ForkServer`, which communicates over stdin and stdout
"""

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

BEFORE_IMPORT = {
    # SGLang reads both while it is imported.
    "SGLANG_APRIL_CPU": "1",
    "SYNC_TOKEN_IDS_ACROSS_TP": "1",
}


@dataclass
class Forked:
    """The part of `subprocess.Popen` that servers need, for a process that is not a child of this one."""

    pid: int

    def poll(self) -> int | None:
        """Return None while the process runs."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return -1
        return None

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


class ForkServer:
    """The forking process. It imports SGLang at the first `start`, in that server's environment.

    It ends with its parent and then kills its servers, so that none outlives an interrupted test session.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> Forked:
        """Like `Popen([sys.executable, "-m", "tests.support.launch", *argv], …, start_new_session=True)`."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server"],
                cwd=cwd,
                env={**env, **BEFORE_IMPORT},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        requested, answers = self._process.stdin, self._process.stdout
        assert requested is not None
        assert answers is not None
        requested.write(json.dumps({"argv": list(argv), "env": dict(env), "log": str(log)}) + "\n")
        requested.flush()
        answer = answers.readline()
        assert answer, "the fork server has died"
        return Forked(int(answer))

    def close(self) -> None:
        """End the process and its running servers."""
        if self._process is not None:
            self._process.communicate()
            self._process = None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps SGLang's output during import out of the answers
    _import()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # servers are not waited for and must leave no zombies
    servers: dict[int, int] = {}  # by pidfd, which stays valid if the pid is reused
    for line in sys.stdin:
        if not (pid := os.fork()):
            _serve(json.loads(line), answers.fileno())
        with contextlib.suppress(ProcessLookupError):
            servers[os.pidfd_open(pid)] = pid
        print(pid, file=answers, flush=True)
    for ended in select.select(servers, [], [], 0)[0]:
        del servers[ended]
    for pid in servers.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _import() -> None:
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # see launch.py
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401
    from setproctitle import getproctitle

    from sglang_april.cpu import processes

    getproctitle()  # so that forks can be renamed: the first call must find the environment where it was at the start
    assert processes.may_fork(), (processes.thread_names(), threading.enumerate())
    gc.collect()
    gc.freeze()  # a collection in a fork then does not write to shared pages


def _serve(start: dict[str, Any], answers: int) -> NoReturn:
    """Run `tests.support.launch` in the fork."""
    code = 1
    try:
        os.setsid()
        os.close(answers)
        log = os.open(start["log"], os.O_WRONLY | os.O_APPEND)
        for standard, opened in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(opened, standard)
        os.environ.clear()
        os.environ.update(start["env"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sys.argv = ["tests.support.launch", *start["argv"]]
        from tests.support import launch

        launch.main(sys.argv[1:])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        print(end, file=sys.stderr)
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
