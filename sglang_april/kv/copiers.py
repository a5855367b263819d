"""Copies between the pool's scattered slots and page-first host memory, in chunks.

The page store's worker thread calls these, never the scheduler thread. On a GPU (CUDA or ROCm) the kernel packs into
one of two staging buffers while the copy engine transfers the other; pinned host memory makes both asynchronous. On a
CPU the kernels of `april_kernels.kv_pages` write to the pages directly. Checksums are computed on the way: for raw
pages on a GPU, inside the packing kernel.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from april_kernels import kv_pages
from sglang_april.kv.page_format import PageFormat

CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of one chunk. Between chunks, other work can use the link, or on a CPU the interpreter and memory bandwidth."""
STAGING_PARTS = 8
"""On a GPU a chunk is copied in this many parts: while one is transferred, the next is packed."""


class DamagedError(Exception):
    """Pages whose checksums do not match those computed when they were written."""


class Copier(Protocol):
    """Moves pages of one pool. `slots` are int64 [tokens] on the pool's device, host `pages` int32 [n, page_words]."""

    page_tokens: int
    page_words: int
    chunk_pages: int
    """Pages in one chunk."""

    def enter_thread(self) -> None:
        """Called once in the thread that copies, before the first copy."""

    def fence(self) -> Any:
        """Mark, on the scheduler thread, the work launched so far: a copy that gets this fence starts after it."""

    def gather(self, slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:
        """Copy the rows of `slots` into `pages`; returns the pages' checksums, int64 [n]."""

    def scatter(self, slots: torch.Tensor, pages: torch.Tensor, checksums: torch.Tensor, fence: Any) -> None:
        """Copy `pages` into the rows of `slots`.

        Raises:
            DamagedError: a checksum does not match.
        """


def copier_for(page_format: PageFormat, streams: Sequence["torch.cuda.Stream"] = ()) -> Copier:
    """The copier for the device of the pool, with streams other than these."""
    if page_format.table.device.type == "cpu":
        return CpuCopier(page_format)
    return GpuCopier(page_format, streams=streams)


class CpuCopier:
    """Copies in CPU memory. Forwards are synchronous there, so a fence is empty."""

    def __init__(self, page_format: PageFormat, chunk_bytes: int = CHUNK_BYTES["cpu"]) -> None:
        self._format, self.page_tokens, self.page_words = page_format, page_format.page_tokens, page_format.page_words
        self.chunk_pages = max(1, chunk_bytes // (4 * self.page_words))

    def enter_thread(self) -> None:
        pass

    def fence(self) -> None:
        return None

    def gather(self, slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:  # noqa: ARG002
        chunks = _parts(slots, pages, self.page_tokens, self.chunk_pages)
        return torch.cat([self._format.pack(part_slots, part_pages) for part_slots, part_pages in chunks])

    def scatter(
        self,
        slots: torch.Tensor,
        pages: torch.Tensor,
        checksums: torch.Tensor,
        fence: Any,  # noqa: ARG002
    ) -> None:
        done = 0
        for part_slots, part_pages in _parts(slots, pages, self.page_tokens, self.chunk_pages):
            _check(kv_pages.checksum(part_pages), checksums[done : done + len(part_pages)])
            self._format.unpack(part_slots, part_pages)
            done += len(part_pages)


class GpuCopier:
    """Copies through two staging buffers, with one stream for kernels and one for transfers, ordered by events."""

    def __init__(
        self,
        page_format: PageFormat,
        chunk_bytes: int = CHUNK_BYTES["cuda"],
        streams: Sequence["torch.cuda.Stream"] = (),
    ) -> None:
        self._format, self.page_tokens, self.page_words = page_format, page_format.page_tokens, page_format.page_words
        self._device = page_format.table.device
        self.chunk_pages = max(1, chunk_bytes // (4 * self.page_words))
        self._kernels = _other_stream(self._device, streams)
        self._copies = _other_stream(self._device, [*streams, self._kernels])
        self._staging_pages = max(1, self.chunk_pages // STAGING_PARTS)
        shape = (self._staging_pages, self.page_words)
        self._staging = [torch.empty(shape, dtype=torch.int32, device=self._device) for _ in range(2)]
        self._filled, self._drained = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        page_format.warm_up()

    def enter_thread(self) -> None:
        # A thread begins on device 0: pinning memory there would give every rank a context on it, of about 500 MB.
        torch.cuda.set_device(self._device)

    def fence(self) -> "torch.cuda.Event":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:
        self._kernels.wait_event(fence)
        checksums = []
        for i, (part_slots, part_pages) in enumerate(_parts(slots, pages, self.page_tokens, self._staging_pages)):
            staging, filled, drained = self._buffer(i, len(part_pages))
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(drained)
                checksums.append(self._format.pack(part_slots, staging))
                filled.record(self._kernels)
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(filled)
                part_pages.copy_(staging, non_blocking=True)
                drained.record(self._copies)
        self._copies.synchronize()
        with torch.cuda.stream(self._kernels):
            return torch.cat(checksums).cpu()

    def scatter(self, slots: torch.Tensor, pages: torch.Tensor, checksums: torch.Tensor, fence: Any) -> None:
        self._kernels.wait_event(fence)
        found = []
        for i, (part_slots, part_pages) in enumerate(_parts(slots, pages, self.page_tokens, self._staging_pages)):
            staging, filled, drained = self._buffer(i, len(part_pages))
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(drained)
                staging.copy_(part_pages, non_blocking=True)
                filled.record(self._copies)
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(filled)
                found.append(kv_pages.checksum(staging))
                self._format.unpack(part_slots, staging)
                drained.record(self._kernels)
        with torch.cuda.stream(self._kernels):
            computed = torch.cat(found).cpu()
        _check(computed, checksums)

    def _buffer(self, i: int, pages: int) -> "tuple[torch.Tensor, torch.cuda.Event, torch.cuda.Event]":
        return self._staging[i % 2][:pages], self._filled[i % 2], self._drained[i % 2]


def _other_stream(device: torch.device, streams: Sequence["torch.cuda.Stream"]) -> "torch.cuda.Stream":
    """A stream that is not one of these: torch reuses 32 streams in turn, and copies would wait for forwards."""
    taken = {stream.cuda_stream for stream in streams}
    drawn = (torch.cuda.Stream(device) for _ in range(64))
    return next(stream for stream in drawn if stream.cuda_stream not in taken)


def _parts(
    slots: torch.Tensor, pages: torch.Tensor, page_tokens: int, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(slots, pages) of at most `step` pages each."""
    for first in range(0, len(pages), step):
        last = min(first + step, len(pages))
        yield slots[first * page_tokens : last * page_tokens], pages[first:last]


def _check(computed: torch.Tensor, expected: torch.Tensor) -> None:
    if bad := int((computed != expected).sum()):
        raise DamagedError(f"{bad} of {len(expected)} pages are damaged")
