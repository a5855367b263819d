"""Step 5 of 9 (store): the journal, so that a killed server restarts with every undelivered sample (S8).

SQLite in WAL mode, one writer thread, one transaction per commit. With `synchronous=NORMAL` a committed transaction
survives the death of the process; with FULL, loss of power too (SQLite documentation, "PRAGMA synchronous"). Every
record carries a CRC-32: a damaged one costs the tokens behind it, which are drawn again, and is counted; it is never
used.

Only rank 0 writes, and only acceptance and delivery are waited for (`barrier`).
"""

import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from sglang_april.store.saved import Chunk, Saved, read_saved, seal
from sglang_april.wire import FinishedSample, OpenRound, Prompt, RoundEnded

SCHEMA = 1

_TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ids(run TEXT, id TEXT, next INTEGER, PRIMARY KEY(run, id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds(
    seq INTEGER PRIMARY KEY, round_id TEXT UNIQUE, run TEXT, number INTEGER, spec BLOB, ended BLOB, held INTEGER);
CREATE TABLE IF NOT EXISTS groups(
    gid INTEGER PRIMARY KEY, run TEXT, incarnation INTEGER, n INTEGER, prompt BLOB, params BLOB);
CREATE TABLE IF NOT EXISTS chunks(gid INTEGER, idx INTEGER, start INTEGER, body BLOB, PRIMARY KEY(gid, idx, start));
CREATE TABLE IF NOT EXISTS finished(
    gid INTEGER, idx INTEGER, step INTEGER, body BLOB, round_id TEXT, PRIMARY KEY(gid, idx));
CREATE INDEX IF NOT EXISTS finished_by_round ON finished(round_id);
"""

_DROP = ("DELETE FROM groups WHERE gid=?", "DELETE FROM chunks WHERE gid=?", "DELETE FROM finished WHERE gid=?")

Op = Callable[[sqlite3.Connection], Any]


class JournalError(RuntimeError):
    """The journal cannot be used; the message is one sentence."""


class Journal:
    """Appends are queued by the scheduler thread and written by a thread of its own."""

    def __init__(self, path: Path, sync: str = "normal", keep_replies: int = 2) -> None:
        """Open or create the file.

        Raises:
            JournalError: it cannot be opened, written, or is of another schema.
        """
        self.error = ""
        """Why the last commit failed; empty when all is written. What was queued is kept and tried again."""
        self._keep_replies = keep_replies
        self._queue: queue.SimpleQueue[Op | threading.Event | None] = queue.SimpleQueue()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(f"PRAGMA synchronous={'FULL' if sync == 'full' else 'NORMAL'}")
            self._db.executescript(_TABLES)
            found = self._db.execute("SELECT value FROM meta WHERE key='schema'").fetchone()
            self._db.execute("INSERT OR IGNORE INTO meta VALUES('schema', ?)", (SCHEMA,))
        except sqlite3.Error as error:
            raise JournalError(f"the journal {path} cannot be used: {error}") from error
        if found is not None and found[0] != SCHEMA:
            raise JournalError(f"the journal {path} has schema {found[0]}, and this version writes {SCHEMA}")
        self._thread = threading.Thread(target=self._write, name="april-journal", daemon=True)
        self._thread.start()

    def load(self) -> Saved:
        """Everything undelivered, the open rounds and the kept replies, as of the last committed transaction."""
        return read_saved(self._db)

    # --- what is written

    def accepted(self, spec: OpenRound, number: int, groups: Iterable[tuple[int, int, Prompt, bytes]]) -> None:
        """A round and its new groups: (gid, incarnation, prompt, params) each."""
        held = int(spec.keep_until_ack)
        row = (spec.round_id, spec.run, number, seal(msgspec.structs.replace(spec, prompts=[], params=[])), held)
        rows = [(gid, spec.run, inc, prompt.n, seal(prompt), seal(params)) for gid, inc, prompt, params in groups]
        ids = [(spec.run, prompt.id, inc + 1) for _, inc, prompt, _ in groups]
        self._add(
            lambda db: (
                db.execute("INSERT INTO rounds(round_id, run, number, spec, held) VALUES(?,?,?,?,?)", row),
                db.executemany("INSERT INTO groups VALUES(?,?,?,?,?,?)", rows),
                db.executemany("INSERT OR REPLACE INTO ids VALUES(?,?,?)", ids),
            )
        )

    def tokens(self, gid: int, index: int, start: int, chunk: Chunk) -> None:
        """Tokens [start, start + n) of an unfinished sample: only new ones are appended."""
        body = seal(chunk)
        self._add(lambda db: db.execute("INSERT OR REPLACE INTO chunks VALUES(?,?,?,?)", (gid, index, start, body)))

    def finished(self, gid: int, sample: FinishedSample, step: int) -> None:
        key, body = (gid, sample.index), seal(sample)
        self._add(
            lambda db: (
                db.execute("INSERT OR REPLACE INTO finished VALUES(?,?,?,?,NULL)", (*key, step, body)),
                db.execute("DELETE FROM chunks WHERE gid=? AND idx=?", key),
            )
        )

    def ended(self, event: RoundEnded, delivered: Iterable[tuple[int, int]]) -> None:
        """A round's reply is fixed; `delivered` are (gid, index)."""
        body, rows = seal(event), [(event.round_id, gid, index) for gid, index in delivered]

        def op(db: sqlite3.Connection) -> None:
            db.execute("UPDATE rounds SET ended=? WHERE round_id=?", (body, event.round_id))
            db.executemany("UPDATE finished SET round_id=? WHERE gid=? AND idx=?", rows)
            self._prune(db, event.run)

        self._add(op)

    def acknowledged(self, round_id: str, run: str) -> None:
        def op(db: sqlite3.Connection) -> None:
            db.execute("UPDATE rounds SET held=0 WHERE round_id=?", (round_id,))
            self._prune(db, run)

        self._add(op)

    def dropped(self, gids: Iterable[int]) -> None:
        rows = [(gid,) for gid in gids]
        self._add(lambda db: [db.executemany(statement, rows) for statement in _DROP])

    def version(self, version: int) -> None:
        self._add(lambda db: db.execute("INSERT OR REPLACE INTO meta VALUES('version', ?)", (version,)))

    def _prune(self, db: sqlite3.Connection, run: str) -> None:
        """Replies beyond the last few of a run go, with the groups that only they still named."""
        rows = db.execute(
            "SELECT round_id, held FROM rounds WHERE run=? AND length(ended) > 0 ORDER BY seq DESC", (run,)
        ).fetchall()
        for round_id, held in rows[self._keep_replies :]:
            if not held:
                db.execute("UPDATE rounds SET ended=x'', spec=x'' WHERE round_id=?", (round_id,))
                db.execute("UPDATE finished SET body=x'' WHERE round_id=?", (round_id,))
        db.execute(
            "DELETE FROM groups WHERE run=? AND n = "
            "(SELECT count(*) FROM finished f WHERE f.gid = groups.gid AND length(f.body) = 0)",
            (run,),
        )
        db.execute("DELETE FROM finished WHERE length(body) = 0 AND gid NOT IN (SELECT gid FROM groups)")

    # --- the writer

    def _add(self, op: Op) -> None:
        self._queue.put(op)

    def commit(self) -> None:
        """End of a step: what was added since the last one becomes one transaction, in the background."""
        self._queue.put(threading.Event())

    def barrier(self) -> str:
        """Wait until all that was added is committed; returns `error`."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        return self.error

    def close(self) -> None:
        self.barrier()
        self._queue.put(None)
        self._thread.join()
        self._db.close()

    def _write(self) -> None:
        pending: list[Op] = []
        while (item := self._queue.get()) is not None:
            if not isinstance(item, threading.Event):
                pending.append(item)
                continue
            if pending:
                self.error = self._transaction(pending)
                if not self.error:
                    pending = []
            item.set()

    def _transaction(self, ops: list[Op]) -> str:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for op in ops:
                op(self._db)
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return f"the journal cannot be written: {error}"
        return ""
