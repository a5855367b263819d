"""Step 7 of 9 (train): one rank of a team: its policy, and on rank 0 the pusher."""

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer_bridge.trainer import PushReport, PushWay, TrainerSettings

Outcome = tuple[Any, Exception | None]
"""A call's value, or what it raised."""


class Worker:
    """What one rank does of each call; in the caller's process, or in one of its own."""

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


class RemoteWorker:
    """A rank in a process of its own: the process' main object, which answers with outcomes."""

    def __init__(self, settings: TrainerSettings, rank: int) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.world_size))
        self._settings, self._number = settings, rank
        self._rank: Worker | None = None

    def join(self, init_method: str) -> Outcome:
        """Meet the other ranks, and build the model."""

        def make() -> None:
            self._rank = Worker(self._settings, self._number, init_method)

        return _outcome(make)

    def do(self, method: str, args: tuple[Any, ...]) -> Outcome:
        """One call of the team."""
        return _outcome(getattr(self._rank, method), *args)


def _outcome(call: Callable[..., Any], *args: Any) -> Outcome:
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
