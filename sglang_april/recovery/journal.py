"""The journal, from which a killed server restarts with every undelivered sample (`restart-loses-nothing`).

SQLite in WAL mode, one writer thread; batches that arrive while one transaction is written form the next. With
`synchronous=NORMAL` a committed transaction survives the death of the process; with FULL, loss of power too (SQLite
documentation, "PRAGMA synchronous"). Every record with content carries a CRC-32: a damaged one is counted and never
used, and the tokens from it on are generated again.

While the disk is full or fails, all records wait and are tried again. A record that can never be written is left out,
and fails the event that waits for its batch.
"""

import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_april.recovery.journal_snapshot import JournalSnapshot
from sglang_april.recovery.model_identity import ModelIdentity
from sglang_april.recovery.schema import SCHEMA, TABLES, Op, reply_deleted
from sglang_april.recovery.sealed import CorruptRecordError, seal, unseal
from sglang_april.recovery.snapshot_reader import read_snapshot

log = logging.getLogger("sglang_april")

RETRY_S = 0.5
"""Seconds before the writer retries a failed transaction."""

OnWritten = Callable[[int, Mapping[int, str]], None]
"""Called with the last batch written (0: none), and the batches of which a record can never be written, with the
reason."""
OnFault = Callable[[str], None]
"""Called with why the journal cannot be written from now on, or with an empty string if it can again."""

NEVER = (sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
"""SQLite's errors that blame the record (PEP 249): too big, a constraint, a wrong type. Others blame file or disk."""


class JournalError(RuntimeError):
    """The journal cannot be used; the message is one sentence."""


class UnwritableError(ValueError):
    """An operation that fails however often it is tried."""

    def __init__(self, index: int, error: Exception) -> None:
        """`index`: its position in the transaction."""
        super().__init__(f"the journal cannot store it: {error}")
        self.index = index


def probe(path: Path | str) -> None:
    """Open and close a journal, so that one that cannot be used ends a start before any model is loaded.

    Raises:
        JournalError: as for `Journal`.
    """
    Journal(path).close()


class Journal:
    """The scheduler's thread puts batches of records; the journal's own thread writes them."""

    def __init__(self, path: Path | str, sync: str = "normal") -> None:
        """Open or create the file, and lock it against other servers.

        Raises:
            JournalError: the file cannot be opened or written, is in use, or has another schema.
        """
        self.path = str(path)
        self.error = ""
        """Why the last transaction failed; empty if it succeeded. Failed records are kept and tried again."""
        self._queue: queue.SimpleQueue[list[Op] | None] = queue.SimpleQueue()
        self._put = 0
        self._unwritten: deque[float] = deque()
        """When each batch that is not yet written was put, by the monotonic clock."""
        self._written_batches = 0
        self._bytes = 0
        self._thread: threading.Thread | None = None
        try:
            self._db = self._open(sync)
        except (sqlite3.Error, UnicodeDecodeError) as error:  # a damaged schema is quoted as it is
            in_use = "it is in use by another server" if "locked" in str(error) else str(error)
            raise JournalError(f"the journal {path} cannot be used: {in_use}") from error

    def _open(self, sync: str) -> sqlite3.Connection:
        if not Path(self.path).parent.is_dir():
            raise JournalError(f"the journal {self.path} cannot be used: its folder does not exist")
        for path in (Path(self.path), Path(self.path).parent):
            # SQLite reports this as a disk I/O error. It also writes a second file beside the first.
            if path.exists() and not os.access(path, os.W_OK, effective_ids=True):
                raise JournalError(f"the journal {self.path} cannot be used: {path} is read-only")
        db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        # The lock is held from the first access on, and avoids SQLite's shared memory file.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        fresh = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not fresh:
            row = db.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
            if row is None or row[0] != SCHEMA:
                found = row[0] if row else "unknown"
                raise JournalError(f"the journal {self.path} has schema {found}, and this version writes {SCHEMA}")
        db.execute("PRAGMA journal_mode=WAL")  # writes to the file, which must be a journal
        db.execute(f"PRAGMA synchronous={'FULL' if sync == 'full' else 'NORMAL'}")
        db.execute("BEGIN IMMEDIATE")
        for statement in TABLES.split(";"):
            db.execute(statement)
        if fresh:
            db.execute("INSERT INTO meta VALUES('schema', ?), ('version', ?)", (SCHEMA, seal(0, "version")))
        db.execute("COMMIT")
        return db

    def claim(self, model: ModelIdentity) -> None:
        """Record the model at the first start; refuse another one later. Called before `load`.

        Raises:
            JournalError: the journal belongs to another model, or cannot be written.
        """
        try:
            row = self._db.execute("SELECT value FROM meta WHERE key='model'").fetchone()
            if row is not None and (difference := _identity(row[0], model).difference(model)):
                raise JournalError(
                    f"the journal {self.path} belongs to another model: {difference}; "
                    "start with that model, or with another journal"
                )
            sealed = seal(model, "model")
            if row is None or row[0] != sealed:  # a full disk must not end a restart
                self._db.execute("INSERT OR REPLACE INTO meta VALUES('model', ?)", (sealed,))
        except sqlite3.Error as error:
            raise JournalError(f"the journal {self.path} cannot be used: {error}") from error

    def load(self) -> JournalSnapshot:
        """Everything undelivered, the open rounds and the kept replies. Called before `start`.

        Damaged records are deleted, so that new ones cannot be combined with them.

        Raises:
            JournalError: the file itself is damaged, so records may be missing.
        """
        try:
            if (check := self._db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(check)
            saved = read_snapshot(self._db)
            self._db.execute("BEGIN IMMEDIATE")
            for statement, row in saved.repairs:
                self._db.execute(statement, row)
            for round_id in saved.lost_replies:
                reply_deleted(round_id)(self._db)
            self._db.execute("COMMIT")
        except (sqlite3.Error, ValueError, TypeError) as error:
            raise JournalError(f"the journal {self.path} cannot be read: {error}") from error
        return saved

    def start(self, written: OnWritten = lambda _last, _failed: None, fault: OnFault = lambda _error: None) -> None:
        """Start the writer. In its own thread it calls `written` after every transaction, and then `fault`."""
        self._written, self._fault, self._bytes = written, fault, self._size()
        self._thread = threading.Thread(target=self._write, name="april-journal", daemon=True)
        self._thread.start()

    def put(self, batch: Sequence[Op]) -> int:
        """Queue the records of a step, which are written together or not at all; returns the batch's number, from 1."""
        self._put += 1
        self._unwritten.append(time.monotonic())
        self._queue.put(list(batch))
        return self._put

    def state(self) -> dict[str, Any]:
        """Why it cannot be written, its size, how many batches wait, and for how many seconds the oldest one has."""
        try:
            lag = time.monotonic() - self._unwritten[0]
        except IndexError:
            lag = 0.0
        return {"fault": self.error, "bytes": self._bytes, "waiting": len(self._unwritten), "lag_s": lag}

    def _size(self) -> int:
        files = (Path(self.path), Path(f"{self.path}-wal"))
        try:
            return sum(file.stat().st_size for file in files if file.exists())
        except OSError:  # the disk fails: the last known size
            return self._bytes

    def close(self) -> None:
        """Write the remaining records, if that is possible, and close the file."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
        self._db.close()

    # --- the writer

    def _write(self) -> None:
        pending: list[tuple[int, Op]] = []
        failed: dict[int, str] = {}
        taken, closing = 0, False
        while not closing:
            for batch in self._take():
                closing |= batch is None
                taken += batch is not None
                pending += [(taken, op) for op in batch or ()]
            error = self._write_all(pending, failed)
            while not error and self._written_batches < taken:
                self._written_batches += 1
                self._unwritten.popleft()
            self._report(taken, error, failed)
            if not error:
                pending, failed = [], {}

    def _write_all(self, pending: list[tuple[int, Op]], failed: dict[int, str]) -> str:
        """Write all records in one transaction; those that can never be written go from `pending` to `failed`."""
        while pending:
            try:
                return self._transaction([op for _, op in pending])
            except UnwritableError as error:
                batch, _ = pending.pop(error.index)
                failed[batch] = str(error)
                log.error("a record was not written to the journal: %s", error, exc_info=error.__cause__)
        return ""

    def _take(self) -> list[list[Op] | None]:
        """All queued batches. Waits for the first one, or for `RETRY_S` if a failed transaction must be retried."""
        batches: list[list[Op] | None] = []
        retry_at = time.monotonic() + RETRY_S
        while self.error and None not in batches and (left := retry_at - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                batches.append(self._queue.get(timeout=left))
        if not self.error:
            batches.append(self._queue.get())
        while not self._queue.empty():
            batches.append(self._queue.get())
        return batches

    def _report(self, taken: int, error: str, failed: Mapping[int, str]) -> None:
        before, self.error, self._bytes = self.error, error, self._size()
        self._written(0 if error else taken, failed)
        if error == before:
            return
        if error:
            log.error("%s; the write is retried, and replies wait for it", error)
        else:
            log.info("the journal can be written again")
        self._fault(error)

    def _transaction(self, ops: list[Op]) -> str:
        """Run all operations in one transaction; returns why it failed, or an empty string.

        Raises:
            UnwritableError: one of them can never be written; none has been.
        """
        running = -1
        try:
            if self._db.in_transaction:  # the disk has refused to roll the last one back
                self._db.execute("ROLLBACK")
            self._db.execute("BEGIN IMMEDIATE")
            for running, op in enumerate(ops):  # noqa: B007
                op(self._db)
            running = -1
            self._db.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            if running >= 0 and (isinstance(error, NEVER) or not isinstance(error, sqlite3.Error | MemoryError)):
                raise UnwritableError(running, error) from error
            return f"the journal cannot be written: {error}"
        return ""


def _identity(record: bytes, otherwise: ModelIdentity) -> ModelIdentity:
    try:
        return unseal(record, ModelIdentity, "model")
    except CorruptRecordError:
        log.warning("the journal's record of its model is damaged; it is written again")
        return otherwise
