"""Finds calls of the plugin that would make the host wait for a GPU, on a machine without one.

While a `SyncDetector` is entered, each call of torch from a function of the plugin is recorded if it would synchronise
with a GPU when its tensors were there: reading values, operations whose output shape depends on values, and copies from
pageable host memory. Only the thread that entered it is watched. CPU tensors that stay on the host on a GPU machine
are reported too: such functions belong in `REVIEWED`.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WATCHED = ("sglang_april.adapter.", "sglang_april.kv.", "sglang_april.scheduler.", "april_kernels.")
CPU_ONLY = ("april_kernels.seeded_sampling.cpu.", "april_kernels.kv_pages.reference.")
"""What runs instead of GPU kernels where there is no GPU."""
READS = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "equal", "allclose", "is_nonzero",
}  # fmt: skip
FROM_HOST = {"tensor", "as_tensor", "asarray"}
REVIEWED: dict[str, str] = {
    "sglang_april.adapter.core.host_to_device.to_device": "creates the host tensor that is pinned and then copied",
    "sglang_april.adapter.core.proximal.proximal_logprobs": "once per finished sample, after its forward has ended",
    "sglang_april.adapter.core.page_pool._fill_decode_tensors": "the host copies of lengths and request slots",
}
"""Functions that may make recorded calls, with the reason."""


class SyncDetector(TorchFunctionMode):
    """`found` counts "function: call" of the calls that are not reviewed; `reviewed` those that are."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.reviewed: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if name := _synchronises(func, args, kwargs):
            caller = _caller()
            if caller.startswith(WATCHED) and not caller.startswith(CPU_ONLY):
                (self.reviewed if caller in REVIEWED else self.found)[f"{caller}: {name}"] += 1
        return func(*args, **kwargs)


def _synchronises(func: Any, args: Any, kwargs: dict[str, Any]) -> str:
    """The name of a call that would synchronise, else an empty string."""
    name = getattr(func, "__name__", "")
    if name in READS or name in FROM_HOST:
        return name
    if name == "where" and len(args) + len(kwargs) == 1:
        return "where with a condition only"
    if name in ("__getitem__", "__setitem__", "index_put_", "index_put") and _has_mask(args[1]):
        # A mask that is assigned one value is masked_fill, which does not synchronise.
        fills = name == "__setitem__" and not isinstance(args[2], torch.Tensor)
        return "" if fills else f"{name} with a mask"
    if name == "to" and any(map(_is_device, (*args[1:], *kwargs.values()))) and not kwargs.get("non_blocking"):
        return "to a device, blocking"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    return ""


def _is_device(value: Any) -> bool:
    return isinstance(value, str | torch.device)


def _has_mask(index: Any) -> bool:
    if isinstance(index, tuple | list):
        return any(map(_has_mask, index))
    return isinstance(index, torch.Tensor) and index.dtype is torch.bool


def _caller() -> str:
    """The function that called torch, as module.name."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and not module.startswith("torch"):
            return f"{module}.{frame.f_code.co_name}"
        frame = frame.f_back
    return ""
