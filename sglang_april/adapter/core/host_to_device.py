"""Copies of Python values to the device that do not make the host wait for the GPU."""

from collections.abc import Sequence
from typing import Any

import torch

_ALIGNMENT = 64
"""Tensors that share one copy begin at multiples of this many elements, and so are 16-byte aligned: SGLang's Triton
kernels are compiled again for unaligned tensors."""


def to_device(values: Any, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """`values` (a sequence of numbers or an array) as a tensor on the device.

    A copy from pageable memory, as in `torch.tensor(values, device=device)`, waits for the work queued before it.
    """
    host = torch.tensor(values, dtype=dtype)
    return host if torch.device(device).type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def columns_to_device(columns: Sequence[Sequence[int]], device: torch.device | str) -> list[torch.Tensor]:
    """Lists of one length as int64 tensors on the device, in one copy. They share one storage without overlapping."""
    length = len(columns[0])
    padding = [0] * (-length % _ALIGNMENT)
    table = to_device([[*column, *padding] for column in columns], torch.int64, device)
    return [row[:length] for row in table]
