"""Step 5 of 9 (store): what one rank holds of partials outside of its pool, and the thread that moves it.

Orders come from the scheduler's thread and return at once; one worker carries them out in the order in which they were
given, so that room which one order frees is there for the next, and a page is read after it was written. That a copy is
complete, or could not be made, is reported per order; no decision reads it here (S9).
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from april_kernels import kv_pages
from april_kernels.kv_pages import page_count
from sglang_april.kv.copiers import Copier, DamagedError
from sglang_april.kv.disk_tier import DamagedFileError, DiskTier, Key
from sglang_april.kv.host_tier import HostArena, PageRange
from sglang_april.kv.kv_pages import CopyTier

TRIAL = 0
"""No copy of the scheduler's has this number."""

Report = Callable[[int, str], None]
"""(number of the order, why it failed or an empty string); called on the worker's thread."""


@dataclass(slots=True)
class HostPages:
    """Pages in the arena; those of a sample behind its prefix's, if it has one."""

    runs: list[PageRange]
    sums: torch.Tensor
    """int64 [pages]."""
    prefix: int | None = None


@dataclass(slots=True)
class DiskPages:
    key: Key
    length: int


class LostError(Exception):
    """The pages asked for are not there, because an earlier order failed."""


class PageStore:
    """One rank's arena, files and worker. `number`: a copy's name; `order`: what its outcome is reported under."""

    def __init__(self, copier: Copier, arena: HostArena, disk: DiskTier | None, report: Report) -> None:
        self._copier, self._arena, self._disk, self._report = copier, arena, disk, report
        self._held: dict[int, HostPages | DiskPages] = {}
        shape = (copier.piece, copier.page_words)
        self._bounce = torch.empty(shape, dtype=torch.int32, pin_memory=arena.pinned) if disk is not None else None
        self._pending: dict[int, threading.Event] = {}
        self._orders: queue.SimpleQueue[tuple[int | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="april-store", daemon=True)
        self._thread.start()

    @property
    def disk(self) -> DiskTier | None:
        """The disk tier; before the first order its files may be searched (`regain.py`)."""
        return self._disk

    # --- orders; `slots` is int64 [tokens] on the pool's device

    def put(self, order: int, number: int, slots: torch.Tensor, prefix: tuple[int, int] | None) -> None:
        """Copy to the host. `prefix`: (number, tokens) of what the sample's first tokens are stored under, once."""
        fence = self._copier.fence()
        self._give(order, lambda: self._put(number, slots, prefix, fence))

    def put_on_disk(self, order: int, number: int, slots: torch.Tensor, key: Key, version: int) -> None:
        fence = self._copier.fence()
        self._give(order, lambda: self._put_on_disk(number, slots, key, version, fence))

    def spill(self, order: int, number: int, key: Key, length: int, version: int) -> None:
        """From the host to the disk."""
        self._give(order, lambda: self._spill(number, key, length, version))

    def adopt(self, number: int, key: Key, length: int) -> None:
        """A file that `DiskTier.find` has verified is the copy of this number."""
        self._give(None, lambda: self._held.update({number: DiskPages(key, length)}))

    def get(self, order: int, number: int, slots: torch.Tensor) -> None:
        """Load verified pages into `slots`; the copy stays."""
        fence = self._copier.fence()
        self._give(order, lambda: self._get(number, slots, fence))

    def discard(self, number: int) -> None:
        """Let a copy, or a prefix that nobody uses any more, go."""
        self._give(None, lambda: self._discard(number))

    def verify(self, order: int) -> None:
        """Check every copy; the order fails with the numbers of those that are damaged."""
        self._give(order, self._verify)

    def wait(self, order: int) -> None:
        """Until this rank has carried the order out."""
        if done := self._pending.get(order):
            done.wait()

    def trial(self, tier: CopyTier, slots: torch.Tensor) -> tuple[float, float]:
        """Seconds to copy `slots` to a tier and back, on the caller's thread; only while no order does.

        Raises what a copy may fail with: OSError, MemoryError, DamagedError, DamagedFileError, LostError.
        """
        fence = self._copier.fence()
        key = Key("", "trial", 0, 0)
        began = time.perf_counter()
        try:
            if tier == "host":
                self._put(TRIAL, slots, None, fence)
            else:
                self._put_on_disk(TRIAL, slots, key, 0, fence)
            there = time.perf_counter()
            self._get(TRIAL, slots, fence)
            return there - began, time.perf_counter() - there
        finally:
            self._discard(TRIAL)

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    # --- the worker

    def _give(self, order: int | None, act: Callable[[], None]) -> None:
        if order is not None:
            self._pending[order] = threading.Event()
        self._orders.put((order, act))

    def _work(self) -> None:
        while (item := self._orders.get()) is not None:
            order, act = item
            failure = ""
            try:
                act()
            except (OSError, MemoryError, DamagedError, DamagedFileError, LostError) as error:
                failure = f"{type(error).__name__}: {error}"
            except Exception as error:  # noqa: BLE001 - the thread must live, and every order be reported
                failure = f"internal error: {error!r}"
            if order is not None:
                self._pending.pop(order).set()
                self._report(order, failure)

    def _put(self, number: int, slots: torch.Tensor, prefix: tuple[int, int] | None, fence: Any) -> None:
        start = 0
        if prefix is not None:
            name, start = prefix
            if name not in self._held:
                self._held[name] = self._copied(slots[:start], fence)
        own = self._copied(slots[start:], fence)
        own.prefix = prefix[0] if prefix is not None else None
        self._held[number] = own

    def _copied(self, slots: torch.Tensor, fence: Any) -> HostPages:
        runs = self._arena.take(page_count(len(slots), self._copier.page_tokens))
        try:
            sums = [self._copier.out(mine, self._arena.pages(run), fence) for run, mine in self._along(runs, slots)]
        except BaseException:
            self._arena.give(runs)
            raise
        return HostPages(runs, torch.cat(sums) if sums else torch.empty(0, dtype=torch.int64))

    def _along(self, runs: list[PageRange], slots: torch.Tensor) -> Iterator[tuple[PageRange, torch.Tensor]]:
        """Each run with the slots of its pages."""
        done = 0
        for run in runs:
            end = done + run.size * self._copier.page_tokens
            yield run, slots[done:end]
            done = end

    def _put_on_disk(self, number: int, slots: torch.Tensor, key: Key, version: int, fence: Any) -> None:
        disk, bounce = self._on_disk()

        def pieces() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            step = len(bounce) * self._copier.page_tokens
            for first in range(0, len(slots), step):
                mine = slots[first : first + step]
                pages = bounce[: page_count(len(mine), self._copier.page_tokens)]
                yield pages, self._copier.out(mine, pages, fence)

        disk.save(key, len(slots), version, pieces())
        self._held[number] = DiskPages(key, len(slots))

    def _spill(self, number: int, key: Key, length: int, version: int) -> None:
        disk, _ = self._on_disk()
        held = self._find(number)
        if isinstance(held, DiskPages):
            raise LostError("the copy is on disk already")
        parts = [held] if held.prefix is None else [self._on_host(held.prefix), held]
        try:
            disk.save(key, length, version, ((pages, sums) for p in parts for pages, sums in self._runs(p)))
            self._held[number] = DiskPages(key, length)
        except BaseException:  # whatever it was: a copy that is still named here would give its room back again
            del self._held[number]
            raise
        finally:
            self._arena.give(held.runs)

    def _runs(self, held: HostPages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        done = 0
        for run in held.runs:
            yield self._arena.pages(run), held.sums[done : done + run.size]
            done += run.size

    def _get(self, number: int, slots: torch.Tensor, fence: Any) -> None:
        held = self._find(number)
        if isinstance(held, DiskPages):
            return self._get_from_disk(held, slots, fence)
        start = 0
        if held.prefix is not None:
            shared = self._on_host(held.prefix)
            start = len(shared.sums) * self._copier.page_tokens
            self._load(shared, slots[:start], fence)
        return self._load(held, slots[start:], fence)

    def _load(self, held: HostPages, slots: torch.Tensor, fence: Any) -> None:
        parts = zip(self._along(held.runs, slots), self._runs(held), strict=True)
        for (_, mine), (pages, sums) in parts:
            self._copier.into(mine, pages, sums, fence)

    def _get_from_disk(self, held: DiskPages, slots: torch.Tensor, fence: Any) -> None:
        disk, bounce = self._on_disk()
        done = 0
        for pages, sums in disk.load(held.key, held.length, bounce):
            end = done + len(pages) * self._copier.page_tokens
            self._copier.into(slots[done:end], pages, sums, fence)
            done = end

    def _discard(self, number: int) -> None:
        held = self._held.pop(number, None)
        if isinstance(held, HostPages):
            self._arena.give(held.runs)
        elif held is not None and self._disk is not None:
            self._disk.remove(held.key)

    def _verify(self) -> None:
        bad = [number for number, held in self._held.items() if not self._is_sound(held)]
        if bad:
            raise DamagedError(f"copies {', '.join(map(str, bad))} are damaged")

    def _is_sound(self, held: HostPages | DiskPages) -> bool:
        try:
            parts = self._runs(held) if isinstance(held, HostPages) else self._from_disk(held)
            return all(torch.equal(kv_pages.checksum(pages), sums) for pages, sums in parts)
        except (OSError, DamagedFileError):
            return False

    def _from_disk(self, held: DiskPages) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        disk, bounce = self._on_disk()
        return disk.load(held.key, held.length, bounce)

    def _find(self, number: int) -> HostPages | DiskPages:
        try:
            return self._held[number]
        except KeyError:
            raise LostError("the pages were never stored") from None

    def _on_host(self, number: int) -> HostPages:
        held = self._find(number)
        if isinstance(held, DiskPages):
            raise LostError("the prefix is not on the host")
        return held

    def _on_disk(self) -> tuple[DiskTier, torch.Tensor]:
        if self._disk is None or self._bounce is None:
            raise LostError("there is no disk tier")
        return self._disk, self._bounce
