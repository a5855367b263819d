"""Where the ranks of a team are: in this process, in processes of their own, or (`ray_ranks.py`) in Ray's actors.

A rank that fails ends the team: the others are in the middle of a collective.
"""

import contextlib
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from trainer_bridge.megatron.worker import Outcome, RemoteWorker, Worker
from trainer_bridge.ports import free_port
from trainer_bridge.trainer import TrainerSettings

GRACE_S = 60.0
"""For the other ranks to answer when one has raised."""


class TrainerFailed(RuntimeError):  # noqa: N818
    """A trainer process has died or raised; the team is gone."""


class WorkerDied(Exception):  # noqa: N818
    """One rank will not answer any more."""


class Workers(Protocol):
    """All ranks of a team."""

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The answer of each rank to its own arguments. What a rank raises is raised here."""

    def close(self) -> None:
        """End them all."""


class InProcessWorkers:
    """One rank, in this process."""

    def __init__(self, rank: Worker) -> None:
        self._rank = rank

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `Workers.call`."""
        return [getattr(self._rank, method)(*args[0])]

    def close(self) -> None:
        """As `Workers.close`."""
        self._rank.close()


class RemoteWorkers(ABC):
    """Ranks that are sent their calls; all are waited for."""

    def __init__(self, size: int) -> None:
        self._size = size

    @abstractmethod
    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> None:
        """Begin a call; may raise `WorkerDied`."""

    @abstractmethod
    def _ready(self, ranks: Sequence[int], timeout: float | None) -> list[int]:
        """Waits for one that has answered or died; none after `timeout` seconds."""

    @abstractmethod
    def _receive(self, rank: int) -> Outcome:
        """What it answered; raises `WorkerDied`."""

    @abstractmethod
    def _kill(self) -> None:
        """All of them, at once."""

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `Workers.call`."""
        for rank, arguments in enumerate(args):
            try:
                self._send(rank, method, arguments)
            except WorkerDied as died:
                raise self._failed(rank) from died
        return self._answers()

    def close(self) -> None:
        """As `Workers.close`."""
        with contextlib.suppress(TrainerFailed):
            self.call("close", [()] * self._size)
        self._kill()

    def _answers(self) -> list[Any]:
        """One of each rank. What a rank raised is raised here, and ends the team if the others then do not answer."""
        answers: dict[int, Any] = {}
        errors: list[Exception] = []
        while missing := [rank for rank in range(self._size) if rank not in answers]:
            ready = self._ready(missing, GRACE_S if errors else None)
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
    """Ranks as spawned processes, each at the other end of a pipe."""

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__(settings.world_size)
        context = multiprocessing.get_context("spawn")
        init_method = f"tcp://127.0.0.1:{free_port()}"
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(settings.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, settings, rank, init_method), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)
        self._answers()

    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._pipes[rank].send((method, args))
        except OSError as broken:
            raise WorkerDied from broken

    def _ready(self, ranks: Sequence[int], timeout: float | None) -> list[int]:
        ready = wait([self._pipes[rank] for rank in ranks], timeout)
        return [rank for rank in ranks if self._pipes[rank] in ready]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer: Outcome = self._pipes[rank].recv()
        except (EOFError, OSError) as broken:
            raise WorkerDied from broken
        return answer

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """As `Workers.close`; they may end by themselves first."""
        with contextlib.suppress(TrainerFailed):
            self.call("close", [()] * self._size)
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(GRACE_S)
        self._kill()


def _serve(pipe: Connection, settings: TrainerSettings, number: int, init_method: str) -> None:
    """The main function of one rank's process: answers calls until its pipe closes."""
    rank = RemoteWorker(settings, number)
    with contextlib.suppress(EOFError, OSError):
        pipe.send(rank.join(init_method))
        while True:
            pipe.send(rank.do(*pipe.recv()))
