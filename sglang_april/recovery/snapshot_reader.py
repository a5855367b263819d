"""Read the content of a journal after a restart."""

import secrets
import sqlite3
from typing import Any

import msgspec

from sglang_april.api.messages import FinishedSample, KeptReply, Prompt, RoundEnded, RoundSpec, SavedTrajectory
from sglang_april.api.run_keys import parse_run_key
from sglang_april.recovery.journal_snapshot import Chunk, JournalSnapshot, SnapshotGroup, SnapshotRound, SnapshotSample
from sglang_april.recovery.journal_trajectories import DeliveredTrajectories, read_trajectories
from sglang_april.recovery.schema import DROP_GROUP
from sglang_april.recovery.sealed import CorruptRecordError, unseal

MAX_KEPT = 2**14
"""Answered attached requests that the journal keeps; a restart keeps as many unfinished ones."""


def read_snapshot(db: sqlite3.Connection) -> JournalSnapshot:
    """Read a journal. A damaged record loses only its own content, and is counted in `corrupt`."""
    saved = JournalSnapshot()
    meta = dict(db.execute("SELECT key, value FROM meta"))
    saved.next_gid = meta.get("next_gid", 0)
    saved.epoch, saved.next_epoch = str(meta.get("epoch", "")), secrets.token_hex(16)
    saved.ids = db.execute("SELECT run, id, next FROM ids ORDER BY rowid").fetchall()
    saved.rounds_opened = dict(db.execute("SELECT run, max(number) FROM rounds GROUP BY run"))
    query = "SELECT gid, run, incarnation, prompt, params, accepted, n FROM groups WHERE NOT dropped ORDER BY gid"
    for gid, run, incarnation, prompt_blob, params_blob, accepted, n in db.execute(query).fetchall():
        attached = parse_run_key(run)[0] != "prompts"
        try:
            prompt = unseal(prompt_blob, Prompt, gid, run, incarnation)
            params = unseal(params_blob, bytes, gid)
        except CorruptRecordError:
            saved.corrupt += 1
            saved.lost += not attached and _delivered_samples(db, gid) < n  # requests are sent again
            saved.repairs += [(statement, (gid,)) for statement in DROP_GROUP]
            continue
        if samples := _undelivered(db, saved, gid, prompt.n):
            group = SnapshotGroup(gid, run, incarnation, prompt, params, samples)
            if accepted is not None and group.whole:  # damage may have made it unfinished again
                group.accepted = bool(accepted)
            (saved.attached if attached else saved.groups).append(group)
    _forget_oldest(saved)
    delivered = read_trajectories(db, saved)
    _read_rounds(db, saved, delivered)
    saved.version = _version(saved, meta.get("version"))
    return saved


def _version(saved: JournalSnapshot, record: Any) -> int:
    """The policy version; if its record is damaged, the newest version in any other record."""
    try:
        return unseal(record, int, "version")
    except CorruptRecordError:
        saved.corrupt += 1
        saved.version_damaged = True
    samples = [s for g in saved.groups for s in g.samples]
    legs = [leg.result for t in saved.trajectories for leg in t.legs]
    spans = [span for leg in legs for span in leg.spans]
    spans += [span for s in samples for part in (s.chunk, s.finished) if part is not None for span in part.spans]
    return max([span.version for span in spans] + [r.ended.policy_version for r in saved.replies], default=0)


def _forget_oldest(saved: JournalSnapshot) -> None:
    """Bound the unfinished attached requests: a caller may never come back, or comes with another `rid`.

    Their tokens have no bound, because those of all that were in flight at a kill are needed.
    """
    unfinished = [group.gid for group in saved.attached if group.samples[0].finished is None]
    forgotten = set(unfinished[:-MAX_KEPT])
    saved.forgotten = len(forgotten)
    saved.attached = [group for group in saved.attached if group.gid not in forgotten]
    saved.repairs += [(statement, (gid,)) for gid in forgotten for statement in DROP_GROUP]


def _delivered_samples(db: sqlite3.Connection, gid: int) -> int:
    query = "SELECT count(*) FROM finished WHERE gid=? AND round_id IS NOT NULL"
    count: int = db.execute(query, (gid,)).fetchone()[0]
    return count


def _undelivered(db: sqlite3.Connection, saved: JournalSnapshot, gid: int, n: int) -> list[SnapshotSample]:
    rows = {i: rest for i, *rest in db.execute(
        "SELECT idx, start, step, body, round_id FROM finished WHERE gid=?", (gid,))}  # fmt: skip
    first = {i: rest for i, *rest in db.execute("SELECT idx, place, number FROM admitted WHERE gid=?", (gid,))}
    samples = []
    for index in range(n):
        start, step, body, round_id = rows.get(index, (0, 0, None, None))
        if round_id is not None:
            continue
        position, number = first.get(index, (-1, -1))
        sample = SnapshotSample(index, position, number, step=step)
        sample.chunk = _tokens(db, saved, gid, index)
        if body is not None:
            try:
                sample.finished = _whole(unseal(body, FinishedSample, gid, index, start, step), start, sample.chunk)
                sample.chunk = None
            except CorruptRecordError:
                saved.corrupt += 1
                saved.repairs.append(("DELETE FROM finished WHERE gid=? AND idx=?", (gid, index)))
        samples.append(sample)
    return samples


def _tokens(db: sqlite3.Connection, saved: JournalSnapshot, gid: int, index: int) -> Chunk | None:
    """The chunks of a sample joined into one, up to the first missing or damaged one."""
    whole: Chunk | None = None
    query = "SELECT start, body FROM chunks WHERE gid=? AND idx=? ORDER BY start"
    for start, body in db.execute(query, (gid, index)):
        try:
            chunk = unseal(body, Chunk, gid, index, start)
            if start != (whole.length if whole else 0):
                raise CorruptRecordError
        except CorruptRecordError:
            saved.corrupt += 1
            behind = "DELETE FROM chunks WHERE gid=? AND idx=? AND start>=?"
            saved.repairs.append((behind, (gid, index, start)))
            break
        whole = chunk if whole is None else _joined(whole, chunk)
    return whole


def _joined(whole: Chunk, more: Chunk) -> Chunk:
    top = None if more.top_logprobs is None else [*(whole.top_logprobs or ()), *more.top_logprobs]
    return Chunk(
        whole.output_ids + more.output_ids,
        whole.logprobs + more.logprobs,
        more.spans,
        top,
        more.proximal or whole.proximal,
    )


def _whole(tail: FinishedSample, start: int, chunk: Chunk | None) -> FinishedSample:
    """A finished sample from its chunks and its final record, which has the tokens from `start` on."""
    if start == 0:
        return tail
    if chunk is None or chunk.length < start:
        raise CorruptRecordError
    top = None if tail.top_logprobs is None else [*(chunk.top_logprobs or ())[:start], *tail.top_logprobs]
    return msgspec.structs.replace(
        tail,
        output_ids=chunk.output_ids[: 4 * start] + tail.output_ids,
        logprobs=chunk.logprobs[: 4 * start] + tail.logprobs,
        top_logprobs=top,
    )


def _read_rounds(db: sqlite3.Connection, saved: JournalSnapshot, delivered: DeliveredTrajectories) -> None:
    for round_id, number, spec_blob, ended_blob, held in db.execute(
        "SELECT round_id, number, spec, ended, held FROM rounds ORDER BY seq"
    ).fetchall():
        if not spec_blob:
            saved.gone.append(round_id)
            continue
        try:
            spec = unseal(spec_blob, RoundSpec, round_id, number)
            if ended_blob is None:
                saved.rounds.append(SnapshotRound(spec, number))
            else:
                ended = unseal(ended_blob, RoundEnded, round_id)
                reply = _reply(db, saved, spec, ended)
                reply.trajectories = _delivered(ended, delivered.get(round_id, {}))
                reply.acknowledged = spec.keep_until_ack and not held
                saved.replies.append(reply)
        except CorruptRecordError:
            saved.corrupt += 1
            saved.gone.append(round_id)
            if ended_blob is None:
                saved.repairs.append(("UPDATE rounds SET spec=x'', ended=x'' WHERE round_id=?", (round_id,)))
            else:
                saved.lost_replies.append(round_id)


def _reply(db: sqlite3.Connection, saved: JournalSnapshot, spec: RoundSpec, ended: RoundEnded) -> KeptReply:
    rows = db.execute(
        "SELECT gid, idx, f.start, f.step, f.body, g.run, g.incarnation, g.prompt "
        "FROM finished f JOIN groups g USING(gid) "
        "WHERE f.round_id=?",
        (spec.round_id,),
    ).fetchall()
    samples = []
    by_id: dict[tuple[str, int], Prompt] = {}
    for gid, index, start, step, body, run, incarnation, prompt_blob in rows:
        tail = unseal(body, FinishedSample, gid, index, start, step)
        samples.append(_whole(tail, start, _tokens(db, saved, gid, index) if start else None))
        prompt = unseal(prompt_blob, Prompt, gid, run, incarnation)
        by_id[prompt.id, incarnation] = prompt
    there = {(s.id, s.incarnation, s.index) for s in samples}
    try:
        prompts = [by_id[d.id, d.incarnation] for d in ended.deliver]
    except KeyError as error:
        raise CorruptRecordError from error
    if any((d.id, d.incarnation, i) not in there for d in ended.deliver for i in d.indices):
        raise CorruptRecordError
    return KeptReply(spec, ended, prompts, samples)


def _delivered(ended: RoundEnded, known: dict[str, SavedTrajectory]) -> list[SavedTrajectory]:
    try:
        return [known[name] for name in ended.trajectories]
    except KeyError as error:
        raise CorruptRecordError from error
