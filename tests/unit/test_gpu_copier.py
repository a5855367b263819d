"""`GpuCopier` on streams that run in every order a GPU may take (fake_cuda.py)."""

import contextlib
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from sglang_april.kv import copiers
from sglang_april.kv.copiers import DamagedError, GpuCopier
from tests.unit import fake_cuda

PAGE_TOKENS, WORDS, POOL = 2, 3, 40
POISON = -999


class LaunchMode(TorchFunctionMode):
    """Queues asynchronous operations, and runs the current stream to its end before a tensor is read."""

    def __init__(self, gpu: fake_cuda.FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args
            self._gpu.launch(lambda: (target.copy_(source), source.fill_(POISON) if is_staging(source) else None))
            return target
        if func is torch.cat:
            out = torch.full((sum(map(len, args[0])),), POISON, dtype=torch.int64)
            self._gpu.launch(lambda: torch.cat(args[0], out=out))
            return out
        if func is torch.Tensor.cpu:
            self._gpu.current.synchronize()
        return func(*args, **kwargs)


STAGING: set[int] = set()
"""Addresses of staging memory."""


def is_staging(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in STAGING


class Format:
    """Pages that are the rows of a pool, packed and unpacked by the fake GPU."""

    page_tokens, page_words = PAGE_TOKENS, PAGE_TOKENS * WORDS
    table = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, gpu: fake_cuda.FakeGpu) -> None:
        self._gpu = gpu
        self.pool = torch.full((POOL, WORDS), POISON, dtype=torch.int32)

    def pack(self, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        sums = torch.full((len(out),), POISON, dtype=torch.int64)

        def act() -> None:
            out.zero_().view(-1, WORDS)[: len(slots)] = self.pool[slots]
            sums[:] = out.sum(1)

        self._gpu.launch(act)
        return sums

    def unpack(self, slots: torch.Tensor, pages: torch.Tensor) -> None:
        def act() -> None:
            self.pool[slots] = pages.reshape(-1, WORDS)[: len(slots)]
            pages.fill_(POISON)

        self._gpu.launch(act)

    def checksum(self, pages: torch.Tensor) -> torch.Tensor:
        sums = torch.full((len(pages),), POISON, dtype=torch.int64)
        self._gpu.launch(lambda: sums.copy_(pages.sum(1)))
        return sums

    def warm_up(self) -> None:
        pass


@contextlib.contextmanager
def copier_on(gpu: fake_cuda.FakeGpu) -> Iterator[tuple[GpuCopier, Format]]:
    page_format: Any = Format(gpu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", gpu.stream)
        patch.setattr(torch.cuda, "Event", fake_cuda.Event)
        patch.setattr(torch.cuda, "stream", gpu.use)
        patch.setattr(torch.cuda, "current_stream", lambda _device: gpu.current)
        patch.setattr(copiers.kv_pages, "checksum", page_format.checksum)
        copier = GpuCopier(page_format, chunk_bytes=2 * 4 * page_format.page_words)
        STAGING.clear()
        for staging in copier._staging:
            STAGING.add(staging.fill_(POISON).untyped_storage().data_ptr())
        with LaunchMode(gpu):
            yield copier, page_format


def round_trip(tokens: int, seed: int, dropped: str = "") -> bool:
    """Whether rows that a forward has just written survive a copy out, their overwriting, and the load."""
    gpu = fake_cuda.FakeGpu(random.Random(seed))
    slots = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))[:tokens]
    with copier_on(gpu) as (copier, page_format):
        gpu.unordered = set(getattr(copier, dropped)) if dropped.startswith("_") else set()
        wanted = torch.arange(tokens * WORDS, dtype=torch.int32).view(tokens, WORDS)
        pages = torch.full((-(-tokens // PAGE_TOKENS), page_format.page_words), POISON, dtype=torch.int32)

        def forward(rows: torch.Tensor) -> Any:
            gpu.launch(lambda: page_format.pool.index_copy_(0, slots, rows))
            fence = copier.fence()
            if dropped == "fence":
                gpu.unordered.add(fence)
            return fence

        sums = copier.gather(slots, pages, forward(wanted))
        copied = pages.view(-1, WORDS)[:tokens].clone()
        try:
            copier.scatter(slots, pages, sums, forward(torch.full_like(wanted, 7)))
        except DamagedError:
            return False
        return torch.equal(copied, wanted) and torch.equal(page_format.pool[slots], wanted)


@given(st.integers(1, POOL), st.integers(0, 2**32))
def test_rows_survive_in_every_order(tokens: int, seed: int) -> None:
    assert round_trip(tokens, seed)


@pytest.mark.parametrize("dropped", ["fence", "_filled", "_drained"])
def test_each_wait_is_needed(dropped: str) -> None:
    """Positive control: without one kind of wait, some order loses rows."""
    assert not all(round_trip(30, seed, dropped) for seed in range(100))


def test_streams_of_forwards_are_not_used_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = fake_cuda.FakeGpu(random.Random(0))
    pool = [gpu.stream() for _ in range(4)]  # torch hands out its streams in turn
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: pool.insert(0, pool.pop()) or pool[0])
    monkeypatch.setattr(torch.cuda, "Event", fake_cuda.Event)
    streams: Any = [pool[3], pool[1]]
    page_format: Any = Format(gpu)
    copier = GpuCopier(page_format, streams=streams)
    assert len({copier._kernels, copier._copies, *streams}) == 4
