"""The copies of one rank on host and disk. The page store's worker thread alone makes, moves, reads and frees them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from april_kernels import kv_pages
from april_kernels.kv_pages import page_count
from sglang_april.kv.copiers import Copier, DamagedError
from sglang_april.kv.disk_tier import DamagedFileError, DiskPages, DiskTier, Key
from sglang_april.kv.host_tier import HostArena, HostPages, PageRange

VERIFY_BYTES = 16 << 20
"""Bytes that a verification reads between two orders."""


class LostError(Exception):
    """The requested pages do not exist, because an earlier order failed."""


class StoredCopies:
    """Copies by number. `slots` are int64 [tokens] on the pool's device; `fence` is the copier's.

    Methods raise OSError, MemoryError, DamagedError, DamagedFileError or LostError if they fail, and what
    `check_cancelled` raises, which they call before each step.
    """

    def __init__(
        self, copier: Copier, arena: HostArena, disk: DiskTier | None, check_cancelled: Callable[[], None]
    ) -> None:
        self._copier, self._arena, self._disk, self._check_cancelled = copier, arena, disk, check_cancelled
        self._held: dict[int, HostPages | DiskPages] = {}
        shape = (copier.chunk_pages, copier.page_words)
        self._bounce = torch.empty(shape, dtype=torch.int32, pin_memory=arena.pinned) if disk is not None else None

    def copy_to_host(self, number: int, slots: torch.Tensor, prefix: tuple[int, int] | None, fence: Any) -> None:
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
        """Each page range with the slots of its tokens, as a step of its own."""
        start = 0
        for pages in ranges:
            self._check_cancelled()
            end = start + pages.size * self._copier.page_tokens
            yield pages, slots[start:end]
            start = end

    def copy_to_disk(self, number: int, slots: torch.Tensor, key: Key, version: int, fence: Any) -> None:
        disk, bounce = self._require_disk()

        def chunks() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            step = len(bounce) * self._copier.page_tokens
            for first in range(0, len(slots), step):
                self._check_cancelled()
                part = slots[first : first + step]
                pages = bounce[: page_count(len(part), self._copier.page_tokens)]
                yield pages, self._copier.gather(part, pages, fence)

        disk.save(key, len(slots), version, chunks())
        self._held[number] = DiskPages(key, len(slots))

    def register_file(self, number: int, key: Key, length: int) -> None:
        """Use a file that `DiskTier.find` has verified as the copy of this number."""
        self._held[number] = DiskPages(key, length)

    def spill(self, number: int, key: Key, length: int, version: int) -> None:
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

    def load(self, number: int, slots: torch.Tensor, fence: Any) -> None:
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
            self._check_cancelled()
            end = start + len(pages) * self._copier.page_tokens
            self._copier.scatter(slots[start:end], pages, checksums, fence)
            start = end

    def discard(self, number: int) -> None:
        held = self._held.pop(number, None)
        if isinstance(held, HostPages):
            self._arena.free(held.ranges)
        elif held is not None and self._disk is not None:
            self._disk.remove(held.key)

    def verify(self) -> Iterator[None]:
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
