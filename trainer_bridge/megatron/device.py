"""Device selection. Megatron-core assumes CUDA; on the CPU this module emulates the parts that it needs."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def select_device(wanted: str, rank: int) -> torch.device:
    """The device of this rank for `auto`, `cpu` or `cuda`. Ranks are assigned to the GPUs of a machine round-robin.

    Raises: RuntimeError: the device is not available.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise RuntimeError("device: cuda needs a visible CUDA device")
    if wanted == "cpu" or not available:
        return CPU
    torch.cuda.set_device(rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def uses_gpus(wanted: str) -> bool:
    """Whether a trainer with this `device` runs on GPUs here."""
    return wanted != "cpu" and torch.cuda.is_available()


def hide_gpus() -> None:
    """Make torch report no GPU in this process. Call before importing Megatron-core, which uses every GPU it sees."""
    torch.cuda.is_available, torch.cuda.device_count = _is_available, _device_count


def initialize(device: torch.device, seed: int) -> None:
    """Seed the generators. Call once per process, between creating Megatron's process groups and building the model."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return
    from megatron.core.tensor_parallel import random as megatron_random

    torch.cuda.current_device = lambda: CPU
    torch.cuda.synchronize = _no_op
    torch.cuda.empty_cache = _no_op
    megatron_random._CUDA_RNG_STATE_TRACKER = _NullRngTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def allocating_on(device: torch.device) -> AbstractContextManager[Any]:
    """Context for Megatron code that allocates on "cuda" explicitly: gradient buffers, optimiser states and step."""
    return contextlib.nullcontext() if device.type == "cuda" else _RedirectCudaToCpu()


def _is_available() -> bool:
    return False


def _device_count() -> int:
    return 0


def _no_op(*_: Any, **__: Any) -> None:
    return None


class _NullRngTracker:
    """Replaces Megatron's tracker of CUDA generators. Without dropout no region needs a separate generator."""

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


class _RedirectCudaToCpu(TorchFunctionMode):
    """Allocates on the CPU whatever is requested on CUDA."""

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
            # Megatron's optimiser groups parameters by the names of CUDA tensor types.
            return result.replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.")
        return result
