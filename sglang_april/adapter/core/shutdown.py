"""SIGTERM or Ctrl-C: end the server in order within `--april-shutdown-s`.

SGLang waits for its own requests without a limit and then kills its processes, itself included. Here samples are
suspended and stored first, schedulers end by SGLang's own message (which closes the journal), and the exit status is 0,
or 1 if the journal could not be written.
The time limit or a second signal ends everything at once, with status 1; as with kill -9, nothing in the journal is
lost. Ctrl-C does not wait for SGLang's own requests; the exit status is 130, and the last line names what is kept.
"""

import asyncio
import logging
import os
import threading
import time
from typing import Any, NoReturn

from sglang.srt.managers.io_struct import ShutdownReq
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

from sglang_april import interrupt
from sglang_april.http.shutdown import shut_down

POLL_S = 0.05
STORING = 0.8
"""Share of the time limit for storing KV and for SGLang's requests; the rest is for closing the journal."""

log = logging.getLogger("sglang_april")


class ShutdownHandler:
    """One per HTTP process."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None
        self._interrupted = False
        self.handles_sigint = False

    def signalled(self) -> None:
        """SIGTERM, on the event loop."""
        if self._task is None:
            self._begin("SIGTERM")
        else:
            log.error("april: second signal")
            self._end(1)

    def interrupted(self) -> None:
        """SIGINT, on the event loop."""
        self._interrupted = True
        if self._task is None:
            self._begin("Ctrl-C")
        else:
            self._end(1)

    def _begin(self, cause: str) -> None:
        manager, limit = self._manager, self._manager.april.config.shutdown_s
        self._began = time.monotonic()
        manager.gracefully_exit = True  # /health answers 503
        if manager._subprocess_watchdog is not None:
            manager._subprocess_watchdog.stop()  # it would report schedulers that end as crashed
        timer = threading.Timer(limit, self._too_late)
        timer.daemon = True
        timer.start()
        log.info("april: %s; storing what a restart can use, for %g s at most", cause, limit)
        self._task = asyncio.ensure_future(self._run(STORING * limit))

    async def _run(self, limit: float) -> None:
        try:
            await asyncio.wait_for(self._store(), limit)
        except TimeoutError:
            log.warning("april: not everything was stored within %g s", limit)
        except Exception:
            log.exception("april: the state could not be stored")
        april = self._manager.april
        lost = "records"
        if april.restored_state.fault:
            lost = f"{(await april.state())['journal']['waiting']} batches of records"
        self._manager._dispatch_to_scheduler(ShutdownReq())
        while collect_scheduler_processes():
            await asyncio.sleep(POLL_S)
        log.info("april: shut down in %.1f s", time.monotonic() - self._began)
        if fault := april.restored_state.fault:  # the last attempt to write, as the journal closed, failed too
            log.error("april: %s; %s are lost", fault, lost)
            _end(1)  # also after Ctrl-C, whose last line would say that everything is kept
        self._end(0)

    async def _store(self) -> None:
        await shut_down(self._manager.april)
        while self._manager.model_update_lock.stock and not self._interrupted:
            await asyncio.sleep(POLL_S)  # attached requests are suspended: their callers send them again

    def _too_late(self) -> None:
        log.error("april: the shutdown takes too long and is cut short")
        self._end(1)

    def _end(self, status: int) -> None:
        _end(interrupt.STATUS if self._interrupted else status)


def _end(status: int) -> NoReturn:
    kill_process_tree(os.getpid(), include_parent=False)
    if status == interrupt.STATUS:
        interrupt.say_what_is_kept()
    os._exit(status)
