"""The trainer's ranks: in this process, in separate processes, or in Ray actors (`ray_workers.py`).

If a rank fails, all ranks are killed, because the others may be in the middle of a collective.
"""

import contextlib
import multiprocessing
import pickle
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from sglang_april import interrupt
from trainer_bridge import child_processes
from trainer_bridge.megatron.worker import Outcome, RemoteWorker, Worker
from trainer_bridge.server_process import free_port
from trainer_bridge.trainer import TrainerSettings

FAILURE_TIMEOUT_S = 60.0
"""Seconds for the other ranks to answer after one has raised."""


class TrainerFailed(RuntimeError):  # noqa: N818
    """A rank has died, or failed in the middle of a collective. All ranks have been killed."""


class WorkerDied(Exception):  # noqa: N818
    """A rank has died."""


class Workers(Protocol):
    """All ranks of a trainer."""

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method with the arguments of each rank; the results in rank order. Re-raises what a rank raises."""

    def close(self) -> None:
        """Stop all ranks."""


class InProcessWorkers:
    """One rank, in this process."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `Workers.call`."""
        return [getattr(self.worker, method)(*args[0])]

    def close(self) -> None:
        """As `Workers.close`."""
        self.worker.close()


class RemoteWorkers(ABC):
    """Ranks outside this process. Calls are sent to all of them, and then all results are awaited."""

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> None:
        """Send a call. Raises: WorkerDied."""

    @abstractmethod
    def _ready(self, ranks: Sequence[int], timeout: float | None) -> list[int]:
        """Wait until some of these ranks have answered or died; returns them, or none after `timeout` seconds."""

    @abstractmethod
    def _receive(self, rank: int) -> Outcome:
        """The outcome of the call. Raises: WorkerDied."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill all ranks."""

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `Workers.call`."""
        for rank, arguments in enumerate(args):
            try:
                self._send(rank, method, arguments)
            except WorkerDied as died:
                raise self._failed(rank) from died
        return self._receive_all()

    def close(self) -> None:
        """As `Workers.close`."""
        with contextlib.suppress(TrainerFailed):
            self.call("close", [()] * self._size)
        self._kill()

    def _receive_all(self) -> list[Any]:
        """The result of each rank. Re-raises what a rank raised; if the others then do not answer, all are killed."""
        answers: dict[int, Any] = {}
        errors: list[Exception] = []
        while missing := [rank for rank in range(self._size) if rank not in answers]:
            ready = self._ready(missing, FAILURE_TIMEOUT_S if errors else None)
            if not ready:
                self._kill()
                raise TrainerFailed("a trainer rank failed in the middle of a collective") from errors[0]
            for rank in ready:
                try:
                    answers[rank], error = self._receive(rank)
                except WorkerDied as died:
                    raise self._failed(rank) from (errors or [died])[0]
                if error is not None:
                    errors.append(error)
        if errors:
            raise errors[0]
        return [answers[rank] for rank in range(self._size)]

    def _failed(self, rank: int) -> TrainerFailed:
        self._kill()
        return TrainerFailed(f"trainer rank {rank} has died")


class ProcessWorkers(RemoteWorkers):
    """Ranks as spawned processes, connected by pipes."""

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings.world_size)
        context = multiprocessing.get_context("spawn")
        init_method = f"tcp://127.0.0.1:{free_port()}"
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(settings.world_size):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end, settings, rank, init_method), daemon=True)
            with interrupt.sigint_blocked():
                process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self.processes.append(process)
        self._receive_all()

    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            _send(self._pipes[rank], (method, args))
        except OSError as broken:
            raise WorkerDied from broken

    def _ready(self, ranks: Sequence[int], timeout: float | None) -> list[int]:
        ready = wait([self._pipes[rank] for rank in ranks], timeout)
        return [rank for rank in ranks if self._pipes[rank] in ready]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer: Outcome = _receive(self._pipes[rank])
        except (EOFError, OSError) as broken:
            raise WorkerDied from broken
        return answer

    def _kill(self) -> None:
        child_processes.kill(self.processes)

    def close(self) -> None:
        """As `Workers.close`; processes get time to exit before they are killed."""
        with contextlib.suppress(TrainerFailed):
            self.call("close", [()] * self._size)
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(FAILURE_TIMEOUT_S)
        self._kill()


def _serve(pipe: Connection, settings: TrainerSettings, rank: int, init_method: str) -> None:
    """Main function of a rank's process: answers calls until its pipe is closed."""
    worker = RemoteWorker(settings, rank)
    with contextlib.suppress(EOFError, OSError):
        _send(pipe, worker.join(init_method))
        while True:
            _send(pipe, worker.do(*_receive(pipe)))


def _send(pipe: Connection, message: Any) -> None:
    """Send tensors by value: `Connection.send` passes a file descriptor for each, and a step has thousands."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())  # noqa: S301  (sent by a process of this trainer)
