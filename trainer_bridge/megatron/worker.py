"""A trainer worker: one rank's policy and, on rank 0, the pusher."""

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer_bridge.megatron.device import hide_gpus
from trainer_bridge.trainer import PushReport, TrainerSettings, TransportName

Outcome = tuple[Any, Exception | None]
"""The value of a call, or the exception that it raised."""


class Worker:
    """One rank of a trainer, in the caller's process or in a separate one."""

    def __init__(self, settings: TrainerSettings, rank: int = 0, init_method: str | None = None) -> None:
        if settings.device == "cpu":
            hide_gpus()
        from trainer_bridge.megatron.policy import Policy

        self.policy = Policy(settings, rank, init_method)
        self._rank, self._settings = rank, settings
        self._pusher: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def connect(self, urls: Sequence[str], transport: TransportName, api_key: str | None) -> None:
        """Connect rank 0 to the engines."""
        if self._rank == 0:
            from trainer_bridge.push.pusher import connect

            if self._pusher is not None:
                self._pusher.close()
            source, device = self._settings.hf_checkpoint, self.policy.device
            self._pusher = connect(urls, transport, source=source, device=device, api_key=api_key)

    def push(self, version: int | None) -> PushReport | None:
        """Push the weights from rank 0; the other ranks of its tensor-parallel group take part in the gathers."""
        from trainer_bridge.hf_folder import batches
        from trainer_bridge.push.pusher import BUCKET_BYTES

        if self._rank >= self._settings.tensor_model_parallel_size:
            return None
        tensors = batches(self.policy.hf_tensors(), BUCKET_BYTES)
        if self._rank == 0:
            if self._pusher is None:
                raise RuntimeError("connect the trainer to engines before it pushes")
            return self._pusher.push(tensors, version)
        for _ in tensors:
            pass
        return None

    def close(self) -> None:
        """Close connections and process groups."""
        if self._pusher is not None:
            self._pusher.close()
        self.policy.close()


class RemoteWorker:
    """A rank in a separate process, which answers calls with outcomes."""

    def __init__(self, settings: TrainerSettings, rank: int) -> None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.world_size))
        self._settings, self._rank = settings, rank
        self._worker: Worker | None = None

    def join(self, init_method: str) -> Outcome:
        """Join the process groups, and build the model."""

        def create() -> None:
            self._worker = Worker(self._settings, self._rank, init_method)

        return _outcome(create)

    def do(self, method: str, args: tuple[Any, ...]) -> Outcome:
        """Call a method of the worker."""
        return _outcome(getattr(self._worker, method), *args)


def _outcome(call: Callable[..., Any], *args: Any) -> Outcome:
    try:
        return call(*args), None
    except Exception as error:  # noqa: BLE001  (raised in the caller's process)
        error.add_note(traceback.format_exc())
        return None, _picklable(error)


def _picklable(error: Exception) -> Exception:
    """The error, or its text if it does not survive pickling."""
    try:
        return pickle.loads(pickle.dumps(error))  # noqa: S301  (created by this process)
    except Exception:  # noqa: BLE001  (unpickling calls the exception's constructor)
        return RuntimeError(f"{type(error).__name__}: {error}")
