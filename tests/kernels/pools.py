"""Pools and slots for the kernels' tests; all memory is poisoned before use."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from april_kernels.kv_pages import PlaneTable

POISON = 0x7F
"""Byte of uninitialized memory; a NaN in float16 and in float8."""


class PoolShape(NamedTuple):
    """Planes of one layer, (heads, dim) each: K and V, or the latent alone."""

    planes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    layers: int = 2


def pool(shape: PoolShape, slots: int, device: str, *, seed: int = 0, empty: bool = False) -> PlaneTable:
    """A pool of random bytes (any bits, NaNs among them), or of poison where `empty`."""
    generator = torch.Generator().manual_seed(seed)
    buffers = []
    for heads, dim in shape.planes * shape.layers:
        size = (slots, heads, dim * shape.dtype.itemsize)
        content = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        if empty:
            content.fill_(POISON)
        buffers.append(content.to(device).view(shape.dtype))
    return PlaneTable.of(buffers)


def choose_slots(kind: str, tokens: int, slots: int, device: str, *, seed: int = 0) -> torch.Tensor:
    """int64 [tokens]: `random`, `contiguous`, or random with `holes` of -1."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "contiguous":
        return torch.arange(1, tokens + 1, device=device)
    chosen = torch.randperm(slots, generator=generator)[:tokens]
    if kind == "holes":
        chosen[torch.rand(tokens, generator=generator) < 0.3] = -1
    return chosen.to(device)


def bytes_of(table: PlaneTable) -> list[torch.Tensor]:
    return [plane.view(torch.uint8).clone() for plane in table.planes]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """`torch.empty` returns poison, so that words a kernel fails to write are detected."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        if tensor.is_contiguous() and tensor.numel():
            tensor.view(-1).view(torch.uint8).fill_(POISON)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


def huge(words: int, device: str) -> torch.Tensor:
    """int32 [words], zeros. On a CPU a sparse map, of which only the pages that are touched take memory."""
    if device != "cpu":
        if torch.cuda.mem_get_info()[0] < 3 * 4 * words:
            pytest.skip("too little GPU memory")
        return torch.zeros(words, dtype=torch.int32, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 4 * words, flags=flags), dtype=torch.int32)
