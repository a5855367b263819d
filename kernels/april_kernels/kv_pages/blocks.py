"""Blocks of memory for pages.

A block that the operating system has just given costs a page fault for every 4 KB when it is first written to, which
takes longer than the copy. On huge pages it is one for every 2 MB. Where a program must request them (Linux's
usual setting, `madvise`), this module does; elsewhere this is `torch.empty`.
"""

import contextlib
import mmap
from collections.abc import Sequence
from math import prod

import torch

FRESH_BYTES = 32 << 20
"""From here on memory is always fresh (the most that glibc's threshold for mmap grows to); smaller blocks mostly
reuse freed memory, whose pages are mapped already."""


def empty(shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """An uninitialised int32 tensor of this shape.

    Raises:
        RuntimeError, MemoryError: out of memory.
    """
    size = 4 * prod(shape)
    if torch.device(device).type != "cpu" or size < FRESH_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(shape), dtype=torch.int32, device=device)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32).view(tuple(shape))
