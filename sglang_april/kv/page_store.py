"""The page store of one rank: copies KV pages between the pool and host or disk, beside the model.

The scheduler thread submits numbered orders, which return at once. A single worker thread executes them
(`order_queue.py`) on the rank's copies (`stored_copies.py`): in submission order, so that memory freed by one order is
available to the next, except that loads go first. The store reports the outcome of every order; no scheduling decision
reads it on this rank (`rank-determinism`).
"""

import threading
import time
from collections.abc import Callable

import torch

from sglang_april.kv.copiers import Copier, DamagedError
from sglang_april.kv.disk_tier import DamagedFileError, DiskTier, Key
from sglang_april.kv.host_tier import HostArena
from sglang_april.kv.kv_pages import CopyTier
from sglang_april.kv.order_queue import OrderCancelledError, OrderQueue
from sglang_april.kv.stored_copies import LostError, StoredCopies

BENCHMARK_NUMBER = 0
"""Copy number used by `benchmark_copy`; the scheduler's copy numbers start at 1."""

Report = Callable[[int, str], None]
"""Called on the worker thread with (order number, failure reason or an empty string)."""

EXPECTED = (
    OSError,
    MemoryError,
    torch.OutOfMemoryError,
    DamagedError,
    DamagedFileError,
    LostError,
    OrderCancelledError,
)
"""What may fail an order; its samples recompute."""


class PageStore:
    """Host arena, disk files and worker thread of one rank.

    `number` names a copy; `order` is the number under which an order's outcome is reported. `slots` are int64 [tokens]
    on the pool's device.
    """

    def __init__(self, copier: Copier, arena: HostArena, disk: DiskTier | None, report: Report) -> None:
        self._copier, self._disk, self._report = copier, disk, report
        self._orders = OrderQueue()
        self._copies = StoredCopies(copier, arena, disk, self._orders.check_cancelled)
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
        self._orders.put(order, number, lambda: self._copies.copy_to_host(number, slots, prefix, fence))

    def copy_to_disk(self, order: int, number: int, slots: torch.Tensor, key: Key, version: int) -> None:
        """Copy KV from the pool to a file; `version` is the oldest policy version that wrote it."""
        fence = self._copier.fence()
        self._orders.put(order, number, lambda: self._copies.copy_to_disk(number, slots, key, version, fence))

    def spill(self, order: int, number: int, key: Key, length: int, version: int) -> None:
        """Move a copy from the host to the disk."""
        self._orders.put(order, number, lambda: self._copies.spill(number, key, length, version))

    def register_file(self, number: int, key: Key, length: int) -> None:
        """Use a file that `DiskTier.find` has verified as the copy of this number."""
        self._orders.put(None, number, lambda: self._copies.register_file(number, key, length))

    def load(self, order: int, number: int, slots: torch.Tensor) -> None:
        """Load pages into `slots` of the pool and verify their checksums; the copy remains."""
        fence = self._copier.fence()
        self._orders.put_load(order, number, lambda: self._copies.load(number, slots, fence))

    def discard(self, number: int) -> None:
        """Free a copy, or a prefix that no copy refers to any more."""
        self._orders.put(None, number, lambda: self._copies.discard(number))

    def verify(self, order: int) -> None:
        """Verify every copy, in slices between other orders; the order fails with the numbers of the damaged copies.

        Only one verification at a time.
        """
        self._orders.put_idle(order, self._copies.verify())

    def wait(self, order: int) -> None:
        """Block until this rank has executed the order."""
        self._orders.wait(order)

    def cancel(self, order: int) -> None:
        """End a copy from the pool or a load, without waiting for other orders.

        An order that has not begun is skipped. For one that is being executed the caller blocks until it has stopped,
        at the latest after its next chunk of the disk or range of the arena. Afterwards its slots are neither read nor
        written, and an incomplete file is gone; a complete copy remains until it is discarded.
        """
        self._orders.cancel(order)

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
                self._copies.copy_to_host(BENCHMARK_NUMBER, slots, None, fence)
            else:
                self._copies.copy_to_disk(BENCHMARK_NUMBER, slots, key, 0, fence)
            stored = time.perf_counter()
            self._copies.load(BENCHMARK_NUMBER, slots, fence)
            return stored - start, time.perf_counter() - stored
        finally:
            self._copies.discard(BENCHMARK_NUMBER)

    def close(self) -> None:
        """Execute the pending orders and end the worker thread."""
        self._orders.close()
        self._thread.join()

    def _work(self) -> None:
        self._copier.enter_thread()
        for order, act in self._orders:
            failure = ""
            try:
                self._orders.check_cancelled()
                act()
            except EXPECTED as error:  # any other exception ends the server (`fail-stop`)
                failure = f"{type(error).__name__}: {error}"
            if order is not None:
                self._report(order, failure)
