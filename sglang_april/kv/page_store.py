"""One rank's page store: the KV pages of suspended samples outside the pool, and the worker thread that moves them.

The scheduler thread submits orders, which return at once. A single worker thread executes them (`order_queue.py`): in
submission order, so that memory freed by one order is available to the next, except that loads go first. The store
reports the outcome of every order; no scheduling decision reads it on this rank (`rank-determinism`).
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from april_kernels import kv_pages
from april_kernels.kv_pages import page_count
from sglang_april.kv.copiers import Copier, DamagedError
from sglang_april.kv.disk_tier import DamagedFileError, DiskPages, DiskTier, Key
from sglang_april.kv.host_tier import HostArena, HostPages, PageRange
from sglang_april.kv.kv_pages import CopyTier
from sglang_april.kv.order_queue import OrderQueue

BENCHMARK_NUMBER = 0
"""Copy number used by `benchmark_copy`; the scheduler's copy numbers start at 1."""

Report = Callable[[int, str], None]
"""Called on the worker thread with (order number, failure reason or an empty string)."""


class LostError(Exception):
    """The requested pages do not exist, because an earlier order failed."""


VERIFY_BYTES = 16 << 20
"""Bytes that a verification reads between two orders."""

EXPECTED = (OSError, MemoryError, torch.OutOfMemoryError, DamagedError, DamagedFileError, LostError)
"""What may fail an order; its samples recompute."""


class PageStore:
    """Host arena, disk files and worker thread of one rank.

    `number` names a copy; `order` is the number under which an order's outcome is reported. `slots` are int64 [tokens]
    on the pool's device.
    """

    def __init__(self, copier: Copier, arena: HostArena, disk: DiskTier | None, report: Report) -> None:
        self._copier, self._arena, self._disk, self._report = copier, arena, disk, report
        self._held: dict[int, HostPages | DiskPages] = {}
        shape = (copier.chunk_pages, copier.page_words)
        self._bounce = torch.empty(shape, dtype=torch.int32, pin_memory=arena.pinned) if disk is not None else None
        self._pending: dict[int, threading.Event] = {}
        self._discarded: set[int] = set()
        """Numbers of copies whose discard is ordered: one that waits to be made is not made."""
        self._reads_pool = threading.Lock()
        """Held by the worker while it copies from the pool."""
        self._orders = OrderQueue()
        self._thread = threading.Thread(target=self._work, name="april-store", daemon=True)
        self._thread.start()

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier. Its files may be searched (`recovery/kv_recovery.py`) before the first order."""
        return self._disk

    # --- orders, submitted by the scheduler thread

    def copy_to_host(self, order: int, number: int, slots: torch.Tensor, prefix: tuple[int, int] | None) -> None:
        """Copy KV from the pool to the host.

        Args:
            prefix: (number, tokens) under which the sample's first tokens are stored once for all samples that share
                them.
        """
        fence = self._copier.fence()
        self._submit(order, number, lambda: self._unless_discarded(number, self._copy_to_host, slots, prefix, fence))

    def copy_to_disk(self, order: int, number: int, slots: torch.Tensor, key: Key, version: int) -> None:
        """Copy KV from the pool to a file; `version` is the oldest policy version that wrote it."""
        fence = self._copier.fence()
        self._submit(
            order, number, lambda: self._unless_discarded(number, self._copy_to_disk, slots, key, version, fence)
        )

    def spill(self, order: int, number: int, key: Key, length: int, version: int) -> None:
        """Move a copy from the host to the disk."""
        self._submit(order, number, lambda: self._spill(number, key, length, version))

    def register_file(self, number: int, key: Key, length: int) -> None:
        """Use a file that `DiskTier.find` has verified as the copy of this number."""
        self._submit(None, number, lambda: self._held.update({number: DiskPages(key, length)}))

    def load(self, order: int, number: int, slots: torch.Tensor) -> None:
        """Load pages into `slots` of the pool and verify their checksums; the copy remains."""
        fence = self._copier.fence()
        self._pending[order] = threading.Event()
        self._orders.put_load(order, number, lambda: self._load(number, slots, fence))

    def discard(self, number: int) -> None:
        """Free a copy, or a prefix that no copy refers to any more."""
        self._discarded.add(number)
        self._submit(None, number, lambda: self._discard(number))

    def verify(self, order: int) -> None:
        """Verify every copy, in slices between other orders; the order fails with the numbers of the damaged copies.

        Only one verification at a time.
        """
        self._orders.put_idle(order, self._verify())

    def wait(self, order: int) -> None:
        """Block until this rank has executed the order."""
        if done := self._pending.get(order):
            done.wait()

    def wait_for_pool(self) -> None:
        """Block while the worker copies from the pool for a copy that is discarded, which no order waits for."""
        with self._reads_pool:
            pass

    def benchmark_copy(self, tier: CopyTier, slots: torch.Tensor) -> tuple[float, float]:
        """Copy `slots` to a tier and back on the caller's thread, and free the copy.

        Call it only while no order is pending.

        Returns:
            Seconds (off the device, back to it).

        Raises:
            OSError, MemoryError, DamagedError, DamagedFileError, LostError: the copy failed.
        """
        fence = self._copier.fence()
        key = Key("", "benchmark", 0, 0)
        start = time.perf_counter()
        try:
            if tier == "host":
                self._copy_to_host(BENCHMARK_NUMBER, slots, None, fence)
            else:
                self._copy_to_disk(BENCHMARK_NUMBER, slots, key, 0, fence)
            stored = time.perf_counter()
            self._load(BENCHMARK_NUMBER, slots, fence)
            return stored - start, time.perf_counter() - stored
        finally:
            self._discard(BENCHMARK_NUMBER)

    def close(self) -> None:
        """Execute the pending orders and end the worker thread."""
        self._orders.close()
        self._thread.join()

    def _submit(self, order: int | None, number: int, act: Callable[[], None]) -> None:
        if order is not None:
            self._pending[order] = threading.Event()
        self._orders.put(order, number, act)

    # --- executed by the worker thread

    def _work(self) -> None:
        self._copier.enter_thread()
        for order, act in self._orders:
            failure = ""
            try:
                act()
            except EXPECTED as error:  # any other exception ends the server (`fail-stop`)
                failure = f"{type(error).__name__}: {error}"
            if order is not None:
                if done := self._pending.pop(order, None):
                    done.set()
                self._report(order, failure)

    def _unless_discarded(self, number: int, copy: Callable[..., None], *args: Any) -> None:
        """Later orders may free the slots of a discarded copy, and the pool may even be unmapped."""
        with self._reads_pool:
            if number not in self._discarded:
                copy(number, *args)

    def _copy_to_host(self, number: int, slots: torch.Tensor, prefix: tuple[int, int] | None, fence: Any) -> None:
        start = 0
        if prefix is not None:
            prefix_number, start = prefix
            if prefix_number not in self._held:
                self._held[prefix_number] = self._gather_to_host(slots[:start], fence)
        own = self._gather_to_host(slots[start:], fence)
        own.prefix = prefix[0] if prefix is not None else None
        self._held[number] = own

    def _gather_to_host(self, slots: torch.Tensor, fence: Any) -> HostPages:
        ranges = self._arena.allocate(page_count(len(slots), self._copier.page_tokens))
        try:
            checksums = [
                self._copier.gather(part, self._arena.pages(pages), fence)
                for pages, part in self._slots_by_range(ranges, slots)
            ]
        except BaseException:
            self._arena.free(ranges)
            raise
        return HostPages(ranges, torch.cat(checksums) if checksums else torch.empty(0, dtype=torch.int64))

    def _slots_by_range(self, ranges: list[PageRange], slots: torch.Tensor) -> Iterator[tuple[PageRange, torch.Tensor]]:
        """Each page range with the slots of its tokens."""
        start = 0
        for pages in ranges:
            end = start + pages.size * self._copier.page_tokens
            yield pages, slots[start:end]
            start = end

    def _copy_to_disk(self, number: int, slots: torch.Tensor, key: Key, version: int, fence: Any) -> None:
        disk, bounce = self._require_disk()

        def chunks() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            step = len(bounce) * self._copier.page_tokens
            for first in range(0, len(slots), step):
                part = slots[first : first + step]
                pages = bounce[: page_count(len(part), self._copier.page_tokens)]
                checksums = self._copier.gather(part, pages, fence)
                if number in self._discarded:  # its slots may be others' by now, and a restart would find the file
                    raise LostError("the copy was discarded while it was made")
                yield pages, checksums

        disk.save(key, len(slots), version, chunks())
        self._held[number] = DiskPages(key, len(slots))

    def _spill(self, number: int, key: Key, length: int, version: int) -> None:
        disk, _ = self._require_disk()
        held = self._find(number)
        if isinstance(held, DiskPages):
            raise LostError("the copy is already on disk")
        parts = [held] if held.prefix is None else [self._find_on_host(held.prefix), held]
        try:
            disk.save(key, length, version, (chunk for part in parts for chunk in self._host_chunks(part)))
            self._held[number] = DiskPages(key, length)
        except BaseException:  # the arena pages are freed below: a copy that stayed here would free them again
            del self._held[number]
            raise
        finally:
            self._arena.free(held.ranges)

    def _host_chunks(self, held: HostPages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(pages, checksums) of each range."""
        start = 0
        for pages in held.ranges:
            yield self._arena.pages(pages), held.checksums[start : start + pages.size]
            start += pages.size

    def _disk_chunks(self, held: DiskPages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(pages, checksums) of each chunk of the file, in the bounce buffer."""
        disk, bounce = self._require_disk()
        return disk.load(held.key, held.length, bounce)

    def _load(self, number: int, slots: torch.Tensor, fence: Any) -> None:
        held = self._find(number)
        if isinstance(held, DiskPages):
            self._load_from_disk(held, slots, fence)
            return
        start = 0
        if held.prefix is not None:
            prefix = self._find_on_host(held.prefix)
            start = len(prefix.checksums) * self._copier.page_tokens
            self._load_from_host(prefix, slots[:start], fence)
        self._load_from_host(held, slots[start:], fence)

    def _load_from_host(self, held: HostPages, slots: torch.Tensor, fence: Any) -> None:
        parts = zip(self._slots_by_range(held.ranges, slots), self._host_chunks(held), strict=True)
        for (_, part), (pages, checksums) in parts:
            self._copier.scatter(part, pages, checksums, fence)

    def _load_from_disk(self, held: DiskPages, slots: torch.Tensor, fence: Any) -> None:
        start = 0
        for pages, checksums in self._disk_chunks(held):
            end = start + len(pages) * self._copier.page_tokens
            self._copier.scatter(slots[start:end], pages, checksums, fence)
            start = end

    def _discard(self, number: int) -> None:
        self._discarded.discard(number)
        held = self._held.pop(number, None)
        if isinstance(held, HostPages):
            self._arena.free(held.ranges)
        elif held is not None and self._disk is not None:
            self._disk.remove(held.key)

    def _verify(self) -> Iterator[None]:
        """Verifies a slice between two `yield`s, in which other orders may move or discard any copy.

        Raises:
            DamagedError: at the end, with the numbers of the damaged copies.
        """
        damaged = []
        # Not the bounce buffer: other orders use it between two slices.
        buffer = torch.empty(
            (max(1, VERIFY_BYTES // (4 * self._copier.page_words)), self._copier.page_words), dtype=torch.int32
        )
        for number, held in list(self._held.items()):
            try:
                for pages, checksums in self._slices(held, buffer):
                    if self._held.get(number) is not held:
                        break
                    if not torch.equal(kv_pages.checksum(pages), checksums):
                        damaged.append(number)
                        break
                    yield
            except (OSError, DamagedFileError):
                if self._held.get(number) is held:
                    damaged.append(number)
        if damaged:
            raise DamagedError(f"copies {', '.join(map(str, damaged))} are damaged")

    def _slices(self, held: HostPages | DiskPages, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(pages, checksums), at most as many at a time as `buffer` holds; those of a file are read into it."""
        if isinstance(held, DiskPages):
            disk, _ = self._require_disk()
            yield from disk.load(held.key, held.length, buffer)
            return
        for pages, checksums in self._host_chunks(held):
            for first in range(0, len(pages), len(buffer)):
                yield pages[first : first + len(buffer)], checksums[first : first + len(buffer)]

    def _find(self, number: int) -> HostPages | DiskPages:
        try:
            return self._held[number]
        except KeyError:
            raise LostError("the pages were never stored") from None

    def _find_on_host(self, number: int) -> HostPages:
        held = self._find(number)
        if isinstance(held, DiskPages):
            raise LostError("the prefix is not on the host")
        return held

    def _require_disk(self) -> tuple[DiskTier, torch.Tensor]:
        if self._disk is None or self._bounce is None:
            raise LostError("there is no disk tier")
        return self._disk, self._bounce
