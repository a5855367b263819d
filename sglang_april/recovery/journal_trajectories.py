"""Trajectories in the journal: their records, leg by leg, and how they have ended (docs/trajectories.md)."""

import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from sglang_april.api.messages import LegEnded, RoundEnded, SavedTrajectory
from sglang_april.api.types import REMEMBERED
from sglang_april.recovery.sealed import CorruptRecordError, seal, unseal

DeliveredTrajectories = dict[str, dict[str, SavedTrajectory]]
"""By round with a kept reply, and by id."""
_Op = Callable[[sqlite3.Connection], Any]
_DELETE = tuple(f"DELETE FROM {table} WHERE run=? AND id=?" for table in ("trajectories", "legs"))  # noqa: S608
_FORGET = (
    "DELETE FROM legs WHERE run=? AND id=? AND NOT EXISTS "
    "(SELECT 1 FROM trajectories t WHERE t.run=legs.run AND t.id=legs.id AND t.round_id IS NOT NULL)",
    "DELETE FROM trajectories WHERE run=? AND id=? AND round_id IS NULL",
)


class Restoring(Protocol):
    """The part of a `JournalSnapshot` that trajectories change."""

    trajectories: list[SavedTrajectory]
    corrupt: int
    repairs: list[tuple[str, tuple[Any, ...]]]


def trajectory(saved: SavedTrajectory) -> _Op:
    """A trajectory has begun or ended; the legs of one that has left are deleted.

    No reply may ever name it: its run may have no rounds.
    """
    key = saved.run, saved.id
    row = (*key, saved.state, seal(saved, *key))

    def op(db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT INTO trajectories(run, id, state, body) VALUES(?,?,?,?) "
            "ON CONFLICT(run, id) DO UPDATE SET state=excluded.state, body=excluded.body",
            row,
        )
        if saved.state in ("rejected", "left"):
            db.execute("DELETE FROM legs WHERE run=? AND id=?", key)
            _forget_oldest(db)

    return op


def forgotten(run: str, ids: list[str]) -> _Op:
    """Trajectories are no longer remembered. Kept replies still have those that they deliver."""
    rows = [(run, name) for name in ids]

    def op(db: sqlite3.Connection) -> None:
        for statement in _FORGET:
            db.executemany(statement, rows)

    return op


def leg(event: LegEnded) -> _Op:
    """A leg has ended."""
    key = event.run, event.trajectory, event.number
    row = (*key, seal(event, *key))
    return lambda db: db.execute("INSERT OR REPLACE INTO legs(run, id, number, body) VALUES(?,?,?,?)", row)


def deliver(db: sqlite3.Connection, event: RoundEnded, legs: Mapping[str, int]) -> bool:
    """The trajectories of a reply leave, those that it delivers and those that it names as rejected.

    Returns:
        Whether the journal has all of them, with as many `legs` as their records.
    """
    named = [(event.run, name) for name in event.rejected]
    db.executemany("UPDATE trajectories SET state='left' WHERE run=? AND id=? AND state='rejected'", named)
    for name in event.trajectories:
        key = event.run, name
        (there,) = db.execute("SELECT count(*) FROM legs WHERE run=? AND id=?", key).fetchone()
        leaves = "UPDATE trajectories SET state='left', round_id=? WHERE run=? AND id=? AND state='done'"
        if not db.execute(leaves, (event.round_id, *key)).rowcount or there != legs[name]:
            return False
    return True


def delete_delivered(db: sqlite3.Connection, round_id: str) -> None:
    """A reply is no longer kept; of its trajectories, as of others that have left, the last ids are remembered."""
    found = db.execute("SELECT run, id, body FROM trajectories WHERE round_id=?", (round_id,)).fetchall()
    db.executemany("DELETE FROM legs WHERE run=? AND id=?", [(run, name) for run, name, _ in found])
    db.executemany(
        "UPDATE trajectories SET round_id=NULL, body=? WHERE run=? AND id=?",
        [(_without_result(*row), *row[:2]) for row in found],
    )
    _forget_oldest(db)


def _forget_oldest(db: sqlite3.Connection) -> None:
    """Of trajectories that are in no reply and have left, the last ids are remembered."""
    db.execute(
        "DELETE FROM trajectories WHERE state IN ('left', 'rejected') AND round_id IS NULL "
        "AND seq <= (SELECT max(seq) FROM trajectories) - ?",
        (REMEMBERED,),
    )


def _without_result(run: str, name: str, body: bytes) -> bytes:
    """The row of a delivered trajectory without the caller's reward and metadata, which can be large."""
    try:
        return seal(msgspec.structs.replace(unseal(body, SavedTrajectory, run, name), result=b""), run, name)
    except CorruptRecordError:
        return body


def read_trajectories(db: sqlite3.Connection, saved: Restoring) -> DeliveredTrajectories:
    """Read all trajectories; returns those of kept replies.

    An active one loses its legs from a damaged one on. A done one with damage is deleted, because
    no reply has a part of a record.
    """
    delivered: DeliveredTrajectories = {}
    query = "SELECT run, id, state, body, round_id FROM trajectories ORDER BY seq"
    for run, name, state, body, round_id in db.execute(query).fetchall():
        try:
            one = msgspec.structs.replace(unseal(body, SavedTrajectory, run, name), state=state)
            one.legs = _legs(db, saved, one) if state in ("active", "done") or round_id is not None else []
        except CorruptRecordError:
            saved.corrupt += 1
            saved.repairs += [(statement, (run, name)) for statement in _DELETE]
            continue
        if round_id is not None:
            delivered.setdefault(round_id, {})[name] = one
        saved.trajectories.append(one if round_id is None else msgspec.structs.replace(one, legs=[]))
    return delivered


def _legs(db: sqlite3.Connection, saved: Restoring, of: SavedTrajectory) -> list[LegEnded]:
    """Its legs in the order in which they ended.

    Raises:
        CorruptRecordError: one is damaged or missing, and the trajectory is not active.
    """
    legs: list[LegEnded] = []
    query = "SELECT seq, number, body FROM legs WHERE run=? AND id=? ORDER BY seq"
    for seq, number, body in db.execute(query, (of.run, of.id)).fetchall():
        try:
            one = unseal(body, LegEnded, of.run, of.id, number)
            if one.parent is not None and one.parent not in {before.number for before in legs}:
                raise CorruptRecordError
        except CorruptRecordError:
            if of.state != "active":
                raise
            saved.corrupt += 1
            saved.repairs.append(("DELETE FROM legs WHERE run=? AND id=? AND seq>=?", (of.run, of.id, seq)))
            break
        legs.append(one)
    return legs
