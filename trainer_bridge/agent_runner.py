"""Runs agent functions in worker processes (`agents.py`), with a timeout for each trajectory.

A trajectory that raises, takes too long, or whose process dies is finished with a problem in place of a reward. The
clock of the timeouts stops between rounds, when the agents' requests are suspended.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from trainer_bridge import child_processes
from trainer_bridge.agents import AgentFinished, Cancel, Ready, StartAgent, serve

START_TIMEOUT_S = 300.0
"""Seconds for a worker to import the agent function."""
CANCEL_TIMEOUT_S = 10.0
"""Seconds after which a worker that has not confirmed a cancellation is killed: its agents block its event loop."""
TICK_S = 0.2


class AgentError(Exception):
    """The agent function cannot be imported."""


class AgentWorker:
    """A worker process, and the threads that receive from it and send to it: a hung agent blocks no caller."""

    def __init__(self, arguments: tuple[str, str, str | None], received: Callable[[AgentFinished], None]) -> None:
        """Start the process and wait for the import. Raises: AgentError: it fails."""
        self._process, self._connection = child_processes.start_worker(serve, *arguments)
        if problem := _problem_at_start(self._connection):
            self.kill()
            raise AgentError(problem)
        self._received = received
        self._messages: queue.SimpleQueue[StartAgent | Cancel | None] = queue.SimpleQueue()
        self._lock, self._dead = threading.Lock(), False
        self._running: set[str] = set()
        """Trajectories that have been started and have not finished."""
        self._unconfirmed: dict[str, float] = {}
        """Cancelled trajectories, and when the worker must have confirmed it (monotonic)."""
        for target in (self._receive, self._send):
            threading.Thread(target=target, name="agents", daemon=True).start()

    def __len__(self) -> int:
        """Number of trajectories in the worker."""
        return len(self._running)

    def start(self, start: StartAgent) -> bool:
        """Start a trajectory; False if the process has died."""
        with self._lock:
            if not self._dead:
                self._running.add(start.id)
                self._messages.put(start)
            return not self._dead

    def cancel(self, trajectory_id: str) -> None:
        """Cancel a trajectory of this worker."""
        with self._lock:
            if trajectory_id in self._running:
                self._unconfirmed[trajectory_id] = time.monotonic() + CANCEL_TIMEOUT_S
                self._messages.put(Cancel(trajectory_id))

    @property
    def hangs(self) -> bool:
        """Whether it has not confirmed a cancellation in time."""
        with self._lock:
            return any(time.monotonic() > deadline for deadline in self._unconfirmed.values())

    def kill(self) -> None:
        """Kill the process. Its trajectories finish with a problem."""
        child_processes.kill([self._process])

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._connection.send(message)

    def _receive(self) -> None:
        while True:
            try:
                finished = self._connection.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                self._running.discard(finished.id)
                self._unconfirmed.pop(finished.id, None)
            self._received(finished)
        with self._lock:
            self._dead = True
            self._unconfirmed.clear()
            lost, self._running = self._running, set()
        self._messages.put(None)
        self.kill()
        for trajectory_id in lost:
            self._received(AgentFinished(trajectory_id, None, "the agent process died"))


@dataclass(slots=True, eq=False)
class _Running:
    """A trajectory in a worker."""

    worker: AgentWorker
    run: str
    left_s: float
    """Seconds left of its timeout."""


class AgentRunner:
    """A pool of workers. `finished` is called once for each trajectory that was not cancelled, on any thread."""

    def __init__(
        self,
        path: str,
        workers: int,
        timeout: float,
        url: str,
        api_key: str | None,
        finished: Callable[[AgentFinished], None],
    ) -> None:
        """Start the workers.

        Args:
            path: `module:function` or `file.py:function`.
            timeout: seconds that a trajectory may take while the clock runs.
            url: base URL of the engine.

        Raises:
            AgentError: the function cannot be imported.
        """
        self._timeout, self._finished = timeout, finished
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._open_runs: set[str] = set()
        """Runs whose clock runs."""
        self._closed = threading.Event()
        self._arguments = (path, url, api_key)
        self._workers: list[AgentWorker] = []
        try:
            for _ in range(workers):
                self._workers.append(AgentWorker(self._arguments, self._receive))
        except AgentError:
            self.close()
            raise
        threading.Thread(target=self._watch, name="agent timeouts", daemon=True).start()

    def start(self, run: str, start: StartAgent) -> None:
        """Start a trajectory of a run, in the worker with the fewest. Raises: AgentError: as the constructor."""
        while True:
            number = min(range(len(self._workers)), key=lambda number: len(self._workers[number]))
            worker = self._workers[number]
            with self._lock:
                self._running[start.id] = _Running(worker, run, self._timeout)
            if worker.start(start):
                return
            self._workers[number] = AgentWorker(self._arguments, self._receive)

    def cancel(self, ids: Iterable[str]) -> list[str]:
        """Cancel trajectories, which are not reported as finished; returns those that were running."""
        cancelled = []
        for trajectory_id in ids:
            with self._lock:
                running = self._running.pop(trajectory_id, None)
            if running is not None:
                running.worker.cancel(trajectory_id)
                cancelled.append(trajectory_id)
        return cancelled

    @contextmanager
    def clock(self, run: str) -> Iterator[None]:
        """Let the time of a run's trajectories run."""
        with self._lock:
            self._open_runs.add(run)
        try:
            yield
        finally:
            with self._lock:
                self._open_runs.discard(run)

    def close(self) -> None:
        """Kill the workers. Nothing is reported as finished any more."""
        self._closed.set()
        with self._lock:
            self._running.clear()
        for worker in self._workers:
            worker.kill()

    def _receive(self, finished: AgentFinished) -> None:
        with self._lock:
            expected = self._running.pop(finished.id, None)
        if expected is not None:
            self._finished(finished)

    def _watch(self) -> None:
        """Cancel trajectories whose time is up, and kill workers that do not confirm the cancellation."""
        before = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            late = self._late(now - before)
            before = now
            for trajectory_id in self.cancel(late):
                self._finished(AgentFinished(trajectory_id, None, f"not finished after {self._timeout:g} s"))
            for worker in self._workers:
                if worker.hangs:
                    worker.kill()

    def _late(self, elapsed: float) -> list[str]:
        """Let `elapsed` seconds pass where the clock runs; the trajectories that have none left."""
        with self._lock:
            ticking = {name: running for name, running in self._running.items() if running.run in self._open_runs}
            for running in ticking.values():
                running.left_s -= elapsed
            return [name for name, running in ticking.items() if running.left_s <= 0]


def _problem_at_start(connection: Connection) -> str:
    """The error of the import, from a worker's first message; empty if it succeeded."""
    try:
        if not connection.poll(START_TIMEOUT_S):
            return f"the agent function was not imported within {START_TIMEOUT_S:g} s"
        ready: Ready = connection.recv()
    except (EOFError, OSError):
        return "the agent process died at its start"
    return ready.problem
