"""Step 7 of 9 (train): all ranks of a trainer behind the calls of `trainer.Trainer`.

One rank runs in the caller's process. More than one are processes of their own; the caller sends each its share and
waits for all. A rank that fails ends the team: the others are in the middle of a collective.
"""

import contextlib
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from trainer_bridge.batch import MicroBatch, Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.trainer import PushReport, PushWay, StepReport, TrainerSettings

T = TypeVar("T")
GRACE_S = 60.0
"""For the other ranks to answer when one has raised."""


class TrainerFailed(RuntimeError):  # noqa: N818
    """A trainer process has died or raised; the team is gone."""


class Rank:
    """What one rank does of each call; in the caller's process, or at the other end of a pipe."""

    def __init__(self, settings: TrainerSettings, rank: int = 0, init_method: str | None = None) -> None:
        from trainer_bridge.megatron.policy import Policy

        self._policy = Policy(settings, rank, init_method)
        self._rank, self._settings = rank, settings
        self._pusher: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def connect(self, engines: Sequence[str], way: PushWay, api_key: str | None) -> None:
        """Only rank 0 speaks to engines."""
        if self._rank == 0:
            from trainer_bridge.push.connect import connect

            if self._pusher is not None:
                self._pusher.close()
            source, device = self._settings.hf_checkpoint, self._policy.device
            self._pusher = connect(engines, way, source=source, device=device, api_key=api_key)

    def push(self, version: int | None) -> PushReport | None:
        """Rank 0 sends; the other ranks of its tensor-parallel group help to put tensors together."""
        from trainer_bridge.hf_folder import batches
        from trainer_bridge.push.pusher import BUCKET_BYTES

        if self._rank >= self._settings.tensor_model_parallel_size:
            return None
        tensors = batches(self._policy.hf_tensors(), BUCKET_BYTES)
        if self._rank == 0:
            if self._pusher is None:
                raise RuntimeError("connect the trainer to engines before it pushes")
            return self._pusher.push(tensors, version)
        for _ in tensors:
            pass
        return None

    def close(self) -> None:
        """End connections and groups."""
        if self._pusher is not None:
            self._pusher.close()
        self._policy.close()


def start(settings: TrainerSettings) -> "Team":
    """A trainer of `settings.world_size` ranks."""
    if settings.world_size == 1:
        return Team(settings, _Here(Rank(settings)))
    return Team(settings, _Processes(settings))


class Team:
    """A `trainer.Trainer`."""

    def __init__(self, settings: TrainerSettings, ranks: "_Here | _Processes") -> None:
        self.settings, self._ranks = settings, ranks
        self._replicas = settings.world_size // settings.tensor_model_parallel_size

    def logprobs(self, sequences: Sequence[Sequences]) -> list[Tensor]:
        """As `Trainer.logprobs`."""
        answers = self._ranks.call("logprobs", [(part,) for part in self._shares(sequences)])
        return self._in_order([answers[rank] for rank in self._leaders()], len(sequences))

    def step(self, batches: Sequence[MicroBatch], loss: LossSettings) -> StepReport:
        """As `Trainer.step`."""
        answers = self._ranks.call("step", [(part, loss) for part in self._shares(batches)])
        figures = [answers[rank].sequences for rank in self._leaders()]
        return replace(answers[0], sequences=self._in_order(figures, len(batches)))

    def connect(self, engines: Sequence[str], way: PushWay = "distributed", api_key: str | None = None) -> None:
        """As `Trainer.connect`."""
        self._ranks.call("connect", self._same(engines, way, api_key))

    def push(self, version: int | None = None) -> PushReport:
        """As `Trainer.push`."""
        return self._ranks.call("push", self._same(version))[0]

    def save(self, folder: Path) -> None:
        """As `Trainer.save`."""
        self._ranks.call("save", self._same(folder))

    def load(self, folder: Path) -> None:
        """As `Trainer.load`."""
        self._ranks.call("load", self._same(folder))

    def export(self, folder: Path) -> None:
        """As `Trainer.export`."""
        self._ranks.call("export", self._same(folder))

    def close(self) -> None:
        """As `Trainer.close`."""
        self._ranks.close()

    def _same(self, *args: Any) -> list[tuple[Any, ...]]:
        return [args] * self.settings.world_size

    def _leaders(self) -> range:
        """One rank of each data-parallel replica: tensor-parallel ranks are neighbours."""
        return range(0, self.settings.world_size, self.settings.tensor_model_parallel_size)

    def _shares(self, work: Sequence[T]) -> list[list[T]]:
        """Each rank's part: micro-batch i goes to replica i mod replicas."""
        size = self.settings.tensor_model_parallel_size
        return [list(work[rank // size :: self._replicas]) for rank in range(self.settings.world_size)]

    @staticmethod
    def _in_order(parts: Sequence[Sequence[T]], count: int) -> list[T]:
        """The inverse of `_shares`, from one list per replica."""
        iterators = [iter(part) for part in parts]
        return [next(iterators[i % len(parts)]) for i in range(count)]


class _Here:
    """One rank, in this process."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self._rank, method)(*args[0])]

    def close(self) -> None:
        self._rank.close()


class _Processes:
    """Ranks as spawned processes, each at the other end of a pipe."""

    def __init__(self, settings: TrainerSettings) -> None:
        context = multiprocessing.get_context("spawn")
        init_method = f"tcp://127.0.0.1:{_free_port()}"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(settings.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, settings, rank, init_method), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        for rank, (pipe, arguments) in enumerate(zip(self._pipes, args, strict=True)):
            try:
                pipe.send((method, arguments))
            except OSError as broken:
                self._kill()
                raise TrainerFailed(f"trainer rank {rank} has died") from broken
        return self._answers()

    def _answers(self) -> list[Any]:
        """One of each rank. What a rank raised is raised here, and ends the team if the others then do not answer."""
        answers: dict[int, Any] = {}
        errors: list[Exception] = []
        while missing := [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]:
            ready = wait(missing, timeout=GRACE_S if errors else None)
            if not ready:
                self._kill()
                raise TrainerFailed("a trainer rank failed in the middle of a collective") from errors[0]
            for pipe in ready:
                rank = self._pipes.index(cast(Connection, pipe))
                try:
                    answers[rank], error = self._pipes[rank].recv()
                except (EOFError, OSError) as broken:
                    self._kill()
                    raise TrainerFailed(f"trainer rank {rank} has died") from (errors or [broken])[0]
                if error is not None:
                    errors.append(error)
        if errors:
            raise errors[0]
        return [answers[rank] for rank in range(len(self._pipes))]

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError, TrainerFailed):
            self.call("close", [()] * len(self._pipes))
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_S)
        self._kill()


def _serve(pipe: Connection, settings: TrainerSettings, rank: int, init_method: str) -> None:
    """The main function of one rank's process: answers calls until its pipe closes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.world_size))
    ranks: list[Rank] = []

    def make() -> None:
        ranks.append(Rank(settings, rank, init_method))

    pipe.send(_outcome(make))
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, args = pipe.recv()
            pipe.send(_outcome(getattr(ranks[0], method), *args))


def _outcome(call: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """A call's value, or what it raised."""
    try:
        return call(*args), None
    except Exception as error:  # noqa: BLE001  (raised in the caller's process)
        error.add_note(traceback.format_exc())
        return None, _that_travels(error)


def _that_travels(error: Exception) -> Exception:
    """The error, or its text where it cannot be pickled and unpickled."""
    try:
        return pickle.loads(pickle.dumps(error))  # noqa: S301  (our own)
    except Exception:  # noqa: BLE001  (whatever a foreign exception's constructor may raise)
        return RuntimeError(f"{type(error).__name__}: {error}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
