"""One rank's page store on a small CPU pool, for tests."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from april_kernels.kv_pages import PlaneTable
from sglang_april.kv.copiers import CpuCopier
from sglang_april.kv.disk_tier import DiskTier, Key
from sglang_april.kv.host_tier import HostArena
from sglang_april.kv.page_format import RawPages
from sglang_april.kv.page_store import PageStore

PAGE, SLOTS = 4, 256


class RankStore:
    """A store on a pool of two layers with K and V rows of different sizes. A chunk is one page by default."""

    def __init__(
        self,
        folder: Path | None,
        pages: int = 64,
        write: Callable[[int, memoryview], int] = os.write,
        chunk_bytes: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.k, self.v = ([torch.rand(SLOTS, 2, dim, generator=generator) for _ in range(2)] for dim in (4, 2))
        copier = CpuCopier(RawPages(PlaneTable.mha(self.k, self.v), PAGE), chunk_bytes=chunk_bytes)
        self.arena = HostArena(pages, copier.page_words, pinned=False)
        self.disk = DiskTier(folder, 0, "layout", PAGE, copier.page_words, write)
        self.reports: dict[int, str] = {}
        self.store = PageStore(copier, self.arena, self.disk, self.reports.__setitem__)

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Write KV to the rows of these slots only."""
        return torch.cat([buffer[slots].flatten(1) for buffer in (*self.k, *self.v)], dim=1)

    def fill(self, slots: torch.Tensor) -> None:
        """Write KV in the way a forward does."""
        for buffer in (*self.k, *self.v):
            buffer[slots] = torch.rand(len(slots), *buffer.shape[1:])

    def outcome(self, order: int) -> str:
        self.store.wait(order)
        while order not in self.reports:
            time.sleep(0)  # reported right after
        return self.reports[order]

    def close(self) -> None:
        self.store.close()
        self.disk.close()


def slots_of(count: int, seed: int = 1) -> torch.Tensor:
    """Scattered slots."""
    return torch.tensor(random.Random(seed).sample(range(SLOTS // 2), count))


OTHER_SLOTS = torch.arange(SLOTS // 2, SLOTS)
KEY = Key("run", "prompt", 0, 1)
