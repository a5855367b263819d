"""The in-memory engine with a real page store: its thread, its arena and its files.

The row of a token holds the content of its cell: request, position, version. So a file that outlived its process can be
checked against its sample.
"""

import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from april_kernels.kv_pages import PlaneTable
from sglang_april.kv.copiers import CpuCopier
from sglang_april.kv.disk_tier import DiskTier, Key
from sglang_april.kv.host_tier import HostArena
from sglang_april.kv.kv_pages import StoredKv
from sglang_april.kv.page_format import RawPages
from sglang_april.kv.page_store import PageStore
from sglang_april.scheduler.state import Sample
from tests.unit.fake_copies import File
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import sample_key

PAGE = 4
"""Tokens."""


def key_of(sample: Sample) -> Key:
    group = sample.group
    return Key(group.run.key, group.id, group.incarnation, sample.index)


class StoringEngine(FakeEngine):
    """Carries each order out at once; the in-memory copies decide when its end is reported."""

    def __init__(self, folder: Path, **loop: Any) -> None:
        super().__init__(**loop)
        self.rows = torch.zeros(self.pool, 1, 4, dtype=torch.int32)
        copier = CpuCopier(RawPages(PlaneTable.of([self.rows]), PAGE), chunk_bytes=1)
        self.disk = DiskTier(folder, 0, "layout", PAGE, copier.page_words)
        self._ends: dict[int, str] = {}
        arena = HostArena(loop["host_cap"], copier.page_words, pinned=False)  # caps here are tokens, not whole pages
        self.store = PageStore(copier, arena, self.disk, self._ends.__setitem__)

    def copy_out(self, sample: Sample, order: int) -> None:
        pages = sample.kv.pages
        slots = torch.tensor(pages.slots)
        self.rows[slots, 0] = _rows(self.cells[slot] for slot in pages.slots)
        if pages.copy.tier == "disk":
            self.store.copy_to_disk(order, pages.copy.number, slots, key_of(sample), sample.kv.version)
        else:
            self.store.copy_to_host(order, pages.copy.number, slots, None)
        self._ended(order)
        super().copy_out(sample, order)

    def load(self, sample: Sample, order: int) -> bool:
        if not super().load(sample, order):
            return False
        pages = sample.kv.pages
        slots = torch.tensor(pages.slots)
        self.store.load(order, pages.copy.number, slots)
        self._ended(order)
        assert torch.equal(self.rows[slots, 0], _rows(self.copies.held[pages.copy.number])), "another token's KV"
        return True

    def spill(self, sample: Sample, order: int) -> None:
        self.store.spill(order, sample.kv.pages.copy.number, key_of(sample), sample.kv.pages.length, sample.kv.version)
        self._ended(order)
        super().spill(sample, order)

    def cancel(self, order: int) -> None:
        self.store.cancel(order)
        super().cancel(order)

    def discard(self, number: int) -> None:
        self.store.discard(number)
        super().discard(number)

    def _ended(self, order: int) -> None:
        self.store.wait(order)
        while order not in self._ends:
            time.sleep(0)  # reported right after
        assert self._ends.pop(order) == ""

    # --- what an earlier epoch has left

    def recover_kv(self, sample: Sample) -> None:
        """The sample's KV in the file that outlived its process, every row checked."""
        pages, name = sample.kv.pages, f"{sample.group.gid}.{sample.index}"
        self.store.register_file(pages.copy.number, key_of(sample), pages.length)
        order = -1
        self.store.load(order, pages.copy.number, torch.arange(pages.length))
        self._ended(order)
        rows = self.rows[: pages.length, 0].tolist()
        assert [row[:2] for row in rows] == [[_number(name), at] for at in range(pages.length)], "another sample's KV"
        cells = [(name, at, version) for _, at, version, _ in rows]
        self.copies.folder.write(sample_key(sample), File(StoredKv(pages.length, sample.kv.version), cells, []))
        super().recover_kv(sample)


def _number(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def _rows(cells: Iterable[Any]) -> torch.Tensor:
    """int32 [tokens, 4]."""
    return torch.tensor([[_number(name), place, version, 1] for name, place, version in cells], dtype=torch.int32)
