"""Step 5 of 9 (store): pages between the pool's scattered slots and page-first host memory, piece by piece.

Called by the rank's worker thread, never by the scheduler's. On a GPU (CUDA or ROCm) the kernel packs into one of two
staging buffers while the copy engine moves the other; pinned memory makes both asynchronous. On a CPU the kernels of
`april_kernels.kv_pages` write to the pages directly. Checksums are summed on the way: on a GPU, of full pages, while
the words pass through the kernel.
"""

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from april_kernels import kv_pages
from sglang_april.kv.page_format import PageFormat

PIECE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Of one piece. Between two pieces others get the link, and on a CPU the interpreter and the memory."""


class DamagedError(Exception):
    """Pages whose checksums do not match what was written."""


class Copier(Protocol):
    page_tokens: int
    page_words: int
    piece: int
    """Pages in one piece."""

    def fence(self) -> Any:
        """On the scheduler's thread: what has been launched so far, and must end before a transfer may begin."""

    def out(self, slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:
        """Rows of `slots` into host `pages` (int32 [n, page_words]); returns their checksums, int64 [n]."""

    def into(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor, fence: Any) -> None:
        """Host pages into the rows of `slots`; DamagedError if a checksum does not match."""


def copier_for(form: PageFormat) -> Copier:
    return CpuCopier(form) if form.table.device.type == "cpu" else GpuCopier(form)


class CpuCopier:
    """Plain memory; a forward is over when its call returns, so that there is nothing to wait for."""

    def __init__(self, form: PageFormat, piece_bytes: int = PIECE_BYTES["cpu"]) -> None:
        self._form, self.page_tokens, self.page_words = form, form.page_tokens, form.page_words
        self.piece = max(1, piece_bytes // (4 * self.page_words))

    def fence(self) -> None:
        return None

    def out(self, slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:  # noqa: ARG002
        return torch.cat([self._form.pack(mine, part) for mine, part in _pieces(self, slots, pages)])

    def into(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor, fence: Any) -> None:  # noqa: ARG002
        done = 0
        for mine, part in _pieces(self, slots, pages):
            _compare(kv_pages.checksum(part), sums[done : done + len(part)])
            self._form.unpack(mine, part)
            done += len(part)


class GpuCopier:
    """Two staging buffers, one stream for the kernels and one for the copies, chained by events."""

    def __init__(self, form: PageFormat, piece_bytes: int = PIECE_BYTES["cuda"]) -> None:
        self._form, self.page_tokens, self.page_words = form, form.page_tokens, form.page_words
        self._device = form.table.device
        self.piece = max(1, piece_bytes // (4 * self.page_words))
        self._kernels, self._copies = (torch.cuda.Stream(self._device) for _ in range(2))
        shape = (self.piece, self.page_words)
        self._staging = [torch.empty(shape, dtype=torch.int32, device=self._device) for _ in range(2)]
        self._filled, self._emptied = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
        form.warm_up()

    def fence(self) -> "torch.cuda.Event":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def out(self, slots: torch.Tensor, pages: torch.Tensor, fence: Any) -> torch.Tensor:
        self._kernels.wait_event(fence)
        sums = []
        for i, (mine, part) in enumerate(_pieces(self, slots, pages)):
            staging, filled, emptied = self._buffer(i, len(part))
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(emptied)
                sums.append(self._form.pack(mine, staging))
                filled.record(self._kernels)
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(filled)
                part.copy_(staging, non_blocking=True)
                emptied.record(self._copies)
        self._copies.synchronize()
        with torch.cuda.stream(self._kernels):
            return torch.cat(sums).cpu()

    def into(self, slots: torch.Tensor, pages: torch.Tensor, sums: torch.Tensor, fence: Any) -> None:
        self._kernels.wait_event(fence)
        found = []
        for i, (mine, part) in enumerate(_pieces(self, slots, pages)):
            staging, filled, emptied = self._buffer(i, len(part))
            with torch.cuda.stream(self._copies):
                self._copies.wait_event(emptied)
                staging.copy_(part, non_blocking=True)
                filled.record(self._copies)
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(filled)
                found.append(kv_pages.checksum(staging))
                self._form.unpack(mine, staging)
                emptied.record(self._kernels)
        with torch.cuda.stream(self._kernels):
            arrived = torch.cat(found).cpu()
        _compare(arrived, sums)

    def _buffer(self, i: int, pages: int) -> "tuple[torch.Tensor, torch.cuda.Event, torch.cuda.Event]":
        return self._staging[i % 2][:pages], self._filled[i % 2], self._emptied[i % 2]


def _pieces(copier: Copier, slots: torch.Tensor, pages: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = copier.piece
    for first in range(0, len(pages), step):
        last = min(first + step, len(pages))
        yield slots[first * copier.page_tokens : last * copier.page_tokens], pages[first:last]


def _compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if bad := int((found != wanted).sum()):
        raise DamagedError(f"{bad} of {len(wanted)} pages are damaged")
