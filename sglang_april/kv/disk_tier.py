"""The disk tier of one rank: one file per partial.

    magic | header length, CRC-32 | header (msgpack) | pages | checksums of the pages | their CRC-32

A file is written under a temporary name and renamed when complete, so a reader never reads a partial file. It is not
synced: a file damaged by a loss of power fails its checksums, is counted, and its sample is recomputed
(`verified-pages`). The death of the process alone damages nothing.

After a restart, `recovery/kv_recovery.py` must prove that a file holds KV of the tokens in the journal. The lock file
names the journal epoch in which all files of the folder were written or verified; files of other samples are removed at
start. Within one epoch a sample's tokens only grow, and the journal's tokens are a prefix of them, so equal length
means equal tokens.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from april_kernels import kv_pages
from april_kernels.kv_pages import page_count
from sglang_april.durable import sync_folder
from sglang_april.kv.kv_pages import StoredKv

MAGIC = b"APRILKV1"
SUFFIX = ".kv"
_PARTIAL = ".part"
_FILE_NAME = re.compile(r"[0-9a-f]{32}\.r(?P<rank>\d+)\.(kv|part)")
_IN_USE = "the disk tier's directory {} is in use by another server"
_VERIFY_BYTES = 8 << 20
"""Bytes read at a time while a file is verified."""


class Key(NamedTuple):
    """Identifies a sample across restarts of the server."""

    run: str
    id: str
    incarnation: int
    member: int


@dataclass(slots=True)
class DiskPages:
    """Pages of one copy in a file of the disk tier; `length` in tokens."""

    key: Key
    length: int


class DiskError(RuntimeError):
    """The directory cannot be used. The message is one sentence."""


class DamagedFileError(Exception):
    """A file whose content is not what was written."""


class Header(msgspec.Struct, array_like=True):
    """The header of a file. `length` in tokens; `version`: the oldest policy version that wrote the KV."""

    key: Key
    length: int
    version: int
    page_tokens: int
    page_words: int
    layout: str
    """Describes the bytes: model, rank, dtype, shape of the pool, page format."""


class DiskTier:
    """Files of one rank in a directory that no other server uses."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        layout: str,
        page_tokens: int,
        page_words: int,
        write: Callable[[int, memoryview], int] = os.write,
        *,
        ranks: int = 1,
    ) -> None:
        """Lock the directory, which `ranks` ranks of this server use.

        Raises:
            DiskError: the directory is missing, in use by another server, or not writable.
        """
        self._folder, self._rank, self._ranks, self._layout = folder, rank, ranks, layout
        self._page_tokens, self._page_words = page_tokens, page_words
        self._write = write
        try:
            self._lock = os.open(folder / f"lock.r{rank}", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DiskError(_IN_USE.format(folder)) from None
        except OSError as error:
            raise DiskError(f"the disk tier's directory {folder} cannot be used: {error.strerror}") from error

    def close(self) -> None:
        os.close(self._lock)

    # --- one file

    def save(
        self, key: Key, length: int, version: int, chunks: Iterable[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> torch.Tensor:
        """Write all pages of a sample.

        Args:
            chunks: (pages int32 [n, page_words], checksums int64 [n], or None to compute them here).

        Returns:
            The checksums of all pages, int64 [pages].

        Raises:
            OSError: no space, device error, missing directory. On any exception, including those of `chunks`, no file
                is left, nor one that existed before.
        """
        head = Header(key, length, version, self._page_tokens, self._page_words, self._layout)
        path = self._path(key)
        part = path.with_suffix(_PARTIAL)
        sums: list[torch.Tensor] = []
        try:
            with part.open("wb", buffering=0) as file:
                self._write_all(file.fileno(), _encode_header(head))
                for pages, known in chunks:
                    sums.append(kv_pages.checksum(pages) if known is None else known)
                    self._write_all(file.fileno(), memoryview(pages.numpy()).cast("B"))
                checksums = torch.cat(sums)
                tail = checksums.numpy().tobytes()
                self._write_all(file.fileno(), tail + zlib.crc32(tail).to_bytes(4, "little"))
            part.replace(path)
        except BaseException:
            for left in (part, path):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
            raise
        return checksums

    def load(self, key: Key, length: int, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read the pages of a sample, as many at a time as `buffer` holds; yields (pages, expected checksums).

        The caller verifies the pages against the checksums.

        Raises:
            OSError: the file cannot be read.
            DamagedFileError: the file is short, belongs to another sample or model, or its checksums are damaged.
        """
        with self._path(key).open("rb", buffering=0) as file:
            head, sums = self._read_ends(file.fileno())
            if head.key != key or head.length != length:
                raise DamagedFileError(f"a file of {head.key} with {head.length} tokens, not of {key} with {length}")
            for first in range(0, len(sums), len(buffer)):
                pages = buffer[: min(len(buffer), len(sums) - first)]
                view = memoryview(pages.numpy()).cast("B")
                if file.readinto(view) != len(view):
                    raise DamagedFileError("the file is truncated")
                yield pages, sums[first : first + len(pages)]

    def remove(self, key: Key) -> None:
        """Delete the file of a sample, if there is one."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    # --- after a restart

    @property
    def epoch(self) -> str:
        """The journal epoch in which these files were written or verified; empty if unknown."""
        return os.pread(self._lock, 256, 0).decode(errors="replace")

    def find(self, key: Key, wanted: StoredKv) -> int:
        """Verify every page of a sample's file; returns its size in bytes, or 0 if there is no file with `wanted`.

        Raises:
            OSError, DamagedFileError: a file exists but cannot be used.
        """
        buffer = torch.empty((max(1, _VERIFY_BYTES // (4 * self._page_words)), self._page_words), dtype=torch.int32)
        try:
            with self._path(key).open("rb") as file:
                head, _ = self._read_ends(file.fileno())
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return 0
        if (head.length, head.version) != wanted:
            return 0
        for pages, sums in self.load(key, head.length, buffer):
            if not torch.equal(kv_pages.checksum(pages), sums):
                raise DamagedFileError("pages are damaged")
        return size

    def begin(self, epoch: str, keep: Iterable[Key] = ()) -> int:
        """Remove this rank's files of samples not in `keep` and incomplete files, then record the new epoch.

        Files of ranks that an earlier server had, and this one has not, are removed by any rank, unless a server on
        several machines still runs such a rank here.
        A crash in the middle leaves the previous epoch recorded. The folder is synced before the new epoch is written,
        so no removed file reappears under it after a loss of power.

        Returns:
            How many files were removed.

        Raises:
            DiskError: a file cannot be removed, belongs to another server, or the epoch cannot be written.
        """
        kept = {self._path(key).name for key in keep}
        stale = [
            path
            for path in self._folder.iterdir()
            if (written := _FILE_NAME.fullmatch(path.name))
            and (int(written["rank"]) == self._rank or int(written["rank"]) >= self._ranks)
            and path.name not in kept
        ]
        try:
            self._refuse_ranks_in_use()
            for path in stale:
                path.unlink(missing_ok=True)
            sync_folder(self._folder)
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, epoch.encode(), 0)
            os.fsync(self._lock)
        except OSError as error:
            raise DiskError(f"the disk tier's directory {self._folder} cannot be used: {error.strerror}") from error
        return len(stale)

    def _refuse_ranks_in_use(self) -> None:
        """Ranks beyond this server's may be those of one on several machines, whose rank 0 is elsewhere."""
        for path in self._folder.glob("lock.r*"):
            if not path.suffix[2:].isdecimal() or int(path.suffix[2:]) < self._ranks:
                continue
            lock = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DiskError(_IN_USE.format(self._folder)) from None
            finally:
                os.close(lock)

    # --- bytes

    def _path(self, key: Key) -> Path:
        name = hashlib.blake2b(msgspec.msgpack.encode(key), digest_size=16).hexdigest()
        return self._folder / f"{name}.r{self._rank}{SUFFIX}"

    def _write_all(self, fd: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = self._write(fd, view)
            if written <= 0:
                raise OSError(0, "the write made no progress")
            view = view[written:]

    def _read_ends(self, fd: int) -> tuple[Header, torch.Tensor]:
        """Read header and checksums; leaves the file position at the first page."""
        start = os.pread(fd, 16, 0)
        size = int.from_bytes(start[8:12], "little")
        body = os.pread(fd, min(size, 1 << 20), 16)
        if start[:8] != MAGIC or len(body) != size or zlib.crc32(body) != int.from_bytes(start[12:], "little"):
            raise DamagedFileError("the header is damaged")
        head = msgspec.msgpack.decode(body, type=Header)
        if (head.layout, head.page_tokens, head.page_words) != (self._layout, self._page_tokens, self._page_words):
            raise DamagedFileError("the file is of another model or another pool")
        pages = page_count(head.length, head.page_tokens)
        at = 16 + size + 4 * pages * head.page_words
        tail = os.pread(fd, 8 * pages + 4, at)
        if len(tail) != 8 * pages + 4 or zlib.crc32(tail[:-4]) != int.from_bytes(tail[-4:], "little"):
            raise DamagedFileError("the file is truncated, or its checksums are damaged")
        os.lseek(fd, 16 + size, os.SEEK_SET)
        return head, torch.from_numpy(np.frombuffer(tail[:-4], "<i8").copy())


def _encode_header(head: Header) -> bytes:
    body = msgspec.msgpack.encode(head)
    return MAGIC + len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body
