"""The journal's tables, and the records that change them.

Each function returns an operation. The scheduler's thread calls the function; the writer's thread runs the operation
inside a transaction. The tables identify a group by `gid`, its arrival number over the whole history of
the journal; messages identify it by (run, id, incarnation).
"""

import sqlite3
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang_april.api.messages import FinishedSample, Prompt, RoundEnded, RoundSpec
from sglang_april.api.run_keys import run_key
from sglang_april.api.types import REMEMBERED
from sglang_april.recovery.journal_snapshot import Chunk
from sglang_april.recovery.journal_trajectories import delete_delivered, deliver
from sglang_april.recovery.sealed import seal

SCHEMA = 6

TABLES = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ids(run TEXT, id TEXT, next INTEGER, PRIMARY KEY(run, id));
CREATE TABLE IF NOT EXISTS rounds(
    seq INTEGER PRIMARY KEY, round_id TEXT UNIQUE, run TEXT, number INTEGER, spec BLOB, ended BLOB, held INTEGER);
CREATE TABLE IF NOT EXISTS groups(
    gid INTEGER PRIMARY KEY, run TEXT, id TEXT, incarnation INTEGER, n INTEGER, prompt BLOB, params BLOB,
    accepted INTEGER, dropped INTEGER);
CREATE INDEX IF NOT EXISTS groups_by_id ON groups(run, id, incarnation);
CREATE TABLE IF NOT EXISTS admitted(
    gid INTEGER, idx INTEGER, place INTEGER, number INTEGER, PRIMARY KEY(gid, idx)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks(gid INTEGER, idx INTEGER, start INTEGER, body BLOB, PRIMARY KEY(gid, idx, start));
CREATE TABLE IF NOT EXISTS finished(
    gid INTEGER, idx INTEGER, start INTEGER, step INTEGER, body BLOB, round_id TEXT, PRIMARY KEY(gid, idx));
CREATE INDEX IF NOT EXISTS finished_by_round ON finished(round_id) WHERE round_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS trajectories(
    seq INTEGER PRIMARY KEY, run TEXT, id TEXT, state TEXT, body BLOB, round_id TEXT, UNIQUE(run, id));
CREATE INDEX IF NOT EXISTS trajectories_by_round ON trajectories(round_id) WHERE round_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS legs(
    seq INTEGER PRIMARY KEY, run TEXT, id TEXT, number INTEGER, body BLOB, UNIQUE(run, id, number));
"""

DROP_GROUP = tuple(f"DELETE FROM {table} WHERE gid=?" for table in ("groups", "admitted", "chunks", "finished"))  # noqa: S608

Op = Callable[[sqlite3.Connection], Any]
"""A record. A `sqlite3.OperationalError` means that it can be written later, other errors mostly that it never can."""
NewGroup = tuple[int, int, Prompt, bytes]
"""gid, incarnation, prompt, sampling parameters."""
ForgottenIds = tuple[str, list[str] | None, int]
"""As `Forgotten` of the ledger."""


class RecordError(ValueError):
    """A record contradicts what is in the journal."""


def accepted(spec: RoundSpec, number: int, groups: Iterable[NewGroup], forgotten: Iterable[ForgottenIds] = ()) -> Op:
    """A round, the `number`th of its run, its new groups, and the ids that are no longer remembered because of them."""
    new, gone, run = list(groups), list(forgotten), spec.run
    row = spec.round_id, spec.run_key, number, seal(spec, spec.round_id, number), int(spec.keep_until_ack)

    def op(db: sqlite3.Connection) -> None:
        # An id without a reply may be used again once the HTTP process, which checks ids, has forgotten it.
        db.execute("DELETE FROM rounds WHERE round_id=? AND length(spec)=0", row[:1])
        db.execute("INSERT INTO rounds(round_id, run, number, spec, held) VALUES(?,?,?,?,?)", row)
        _insert_groups(db, run, new)
        _forget_ids(db, gone)

    return op


def extended(spec: RoundSpec, number: int, groups: Iterable[NewGroup], forgotten: Iterable[ForgottenIds] = ()) -> Op:
    """An open round, the `number`th of its run, has a new quota or more groups; the rest as for `accepted`."""
    new, gone, run = list(groups), list(forgotten), spec.run
    row = (seal(spec, spec.round_id, number), spec.round_id)

    def op(db: sqlite3.Connection) -> None:
        db.execute("UPDATE rounds SET spec=? WHERE round_id=?", row)
        _insert_groups(db, run, new)
        _forget_ids(db, gone)

    return op


def attached(run: str, group: NewGroup) -> Op:
    """An attached request has tokens to be kept. It arrived before groups that may have been written already."""
    gid, incarnation, prompt, params = group
    row = (gid, run, prompt.id, incarnation, 1, seal(prompt, gid, run, incarnation), seal(params, gid))

    def op(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO groups VALUES(?,?,?,?,?,?,?,NULL,0)", row)
        newest = "INSERT INTO meta VALUES('next_gid', ?) ON CONFLICT DO UPDATE SET value=max(value, excluded.value)"
        db.execute(newest, (gid + 1,))

    return op


def judged(verdicts: Iterable[tuple[bool, int]]) -> Op:
    """Verdicts of the caller: (accepted, gid) of each group."""
    rows = list(verdicts)
    return lambda db: db.executemany("UPDATE groups SET accepted=? WHERE gid=?", rows)


def _insert_groups(db: sqlite3.Connection, run: str, groups: list[NewGroup]) -> None:
    rows = [(gid, run, p.id, inc, p.n, seal(p, gid, run, inc), seal(params, gid)) for gid, inc, p, params in groups]
    db.executemany("INSERT INTO groups VALUES(?,?,?,?,?,?,?,NULL,0)", rows)
    db.executemany("INSERT OR REPLACE INTO ids VALUES(?,?,?)", [(run, p.id, inc + 1) for _, inc, p, _ in groups])
    if groups:
        db.execute("INSERT OR REPLACE INTO meta VALUES('next_gid', ?)", (groups[-1][0] + 1,))


def _forget_ids(db: sqlite3.Connection, forgotten: list[ForgottenIds]) -> None:
    """The empty id, which no prompt has, means all ids that are not remembered."""
    for run, ids, first in forgotten:
        if ids is None:
            db.execute("DELETE FROM ids WHERE run=?", (run,))
        else:
            db.executemany("DELETE FROM ids WHERE run=? AND id=?", [(run, prompt_id) for prompt_id in ids])
            db.execute("INSERT OR REPLACE INTO ids VALUES(?,'',?)", (run, first))


def admitted(gid: int, index: int, queue_position: int, number: int) -> Op:
    """A sample enters the engine for the first time: its queue position, and the number of the round."""
    row = gid, index, queue_position, number
    return lambda db: db.execute("INSERT OR REPLACE INTO admitted VALUES(?,?,?,?)", row)


def tokens(gid: int, index: int, start: int, chunk: Chunk) -> Op:
    """New output tokens of an unfinished sample, from `start` on."""
    key = gid, index, start
    return lambda db: db.execute("INSERT OR REPLACE INTO chunks VALUES(?,?,?,?)", (*key, seal(chunk, *key)))


def finished(gid: int, start: int, step: int, tail: FinishedSample) -> Op:
    """A sample has finished; `tail` has its tokens from `start` on and all other fields."""
    statement = "INSERT OR REPLACE INTO finished VALUES(?,?,?,?,?,NULL)"
    key = gid, tail.index, start, step
    return lambda db: db.execute(statement, (*key, seal(tail, *key)))


def ended(event: RoundEnded, legs: Mapping[str, int] | None = None) -> Op:
    """A round's reply is fixed. The operation raises RecordError if the round or a part of its reply is not recorded.

    `legs`: in a round of trajectories, how many legs each of its records has.
    """
    run = run_key("prompts" if legs is None else "legs", event.run)
    delivered = [(event.round_id, event.run, d.id, d.incarnation, i) for d in event.deliver for i in d.indices]

    def op(db: sqlite3.Connection) -> None:
        row = (seal(event, event.round_id), event.round_id, run)
        known = db.execute("UPDATE rounds SET ended=? WHERE round_id=? AND run=? AND ended IS NULL", row).rowcount
        found = db.executemany(
            "UPDATE finished SET round_id=? WHERE gid="
            "(SELECT max(gid) FROM groups WHERE run=? AND id=? AND incarnation=?) AND idx=?",
            delivered,
        ).rowcount
        if not known or found < len(delivered) or not deliver(db, event, legs or {}):
            raise RecordError("it lacks the round's acceptance or a part of the reply; see the server's log")

    return op


def acknowledged(round_id: str) -> Op:
    """The caller has stored the reply, which is now kept like any other."""
    return lambda db: db.execute("UPDATE rounds SET held=0 WHERE round_id=?", (round_id,))


def reply_deleted(round_id: str) -> Op:
    """The reply is no longer kept, nor are groups that only such replies refer to; the id is remembered."""

    def op(db: sqlite3.Connection) -> None:
        gids = [gid for (gid,) in db.execute("SELECT DISTINCT gid FROM finished WHERE round_id=?", (round_id,))]
        db.execute("UPDATE rounds SET ended=x'', spec=x'' WHERE round_id=?", (round_id,))
        db.execute("UPDATE finished SET body=x'' WHERE round_id=?", (round_id,))
        _forget_groups(db, gids)
        delete_delivered(db, round_id)
        oldest = "(SELECT max(seq) FROM rounds) - ?"
        db.execute(f"DELETE FROM rounds WHERE length(ended)=0 AND seq <= {oldest}", (REMEMBERED,))  # noqa: S608

    return op


def dropped(gids: Iterable[int]) -> Op:
    """Groups are deleted undelivered. Their samples in kept replies stay."""
    rows = [(gid,) for gid in gids]

    def op(db: sqlite3.Connection) -> None:
        db.executemany("DELETE FROM finished WHERE gid=? AND round_id IS NULL", rows)
        db.executemany("DELETE FROM chunks WHERE gid=?1 AND idx NOT IN (SELECT idx FROM finished WHERE gid=?1)", rows)
        left = "(SELECT count(*) FROM finished f WHERE f.gid=groups.gid)"
        db.executemany(f"UPDATE groups SET dropped=1, n={left} WHERE gid=?", rows)  # noqa: S608
        _forget_groups(db, [gid for (gid,) in rows])

    return op


def version(number: int) -> Op:
    record = seal(number, "version")
    return lambda db: db.execute("INSERT OR REPLACE INTO meta VALUES('version', ?)", (record,))


def epoch(name: str) -> Op:
    """A server epoch (one run of a server with this journal) has begun."""
    return lambda db: db.execute("INSERT OR REPLACE INTO meta VALUES('epoch', ?)", (name,))


def _forget_groups(db: sqlite3.Connection, gids: list[int]) -> None:
    """Delete the groups whose samples are all in replies that are no longer kept."""
    gone = "SELECT gid FROM groups g WHERE gid=? AND n = (SELECT count(*) FROM finished WHERE gid=g.gid AND body=x'')"
    rows = [row for gid in gids for row in db.execute(gone, (gid,))]
    for statement in DROP_GROUP:
        db.executemany(statement, rows)
