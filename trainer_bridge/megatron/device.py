"""Where the trainer runs. Megatron-core takes CUDA for granted: on the CPU a few of its assumptions are made true."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def pick(wanted: str, rank: int) -> torch.device:
    """`auto`, `cpu` or `cuda` as this rank's device; `RuntimeError` where CUDA is asked for and not there.

    Ranks of one machine take its GPUs in turn.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise RuntimeError("device: cuda, and no CUDA device is visible")
    if wanted == "cpu" and available:
        raise RuntimeError("device: cpu needs CUDA_VISIBLE_DEVICES='': Megatron-core uses a GPU that it sees")
    if not available:
        return CPU
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def prepare(device: torch.device, seed: int) -> None:
    """Once in a process, after Megatron's process groups exist and before the model is built."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = _nothing
    torch.cuda.empty_cache = _nothing
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def allocations(device: torch.device) -> AbstractContextManager[Any]:
    """Around what Megatron allocates on CUDA by name: gradient buffers, optimiser states, the optimiser's step."""
    return contextlib.nullcontext() if device.type == "cuda" else _CudaMeansCpu()


def _nothing(*_: Any, **__: Any) -> None:
    return None


class _NoTracker:
    """In place of Megatron's tracker of CUDA generators: there is no dropout, so the regions need none of their own."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        pass

    def add(self, name: str, seed: int) -> None:
        pass

    def fork(self, *_: str) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # Megatron's optimiser sorts parameters by the names of their CUDA types.
            return result.replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
        return result
