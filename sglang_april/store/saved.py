"""Step 5 of 9 (store): what a journal holds, read back after a restart."""

import sqlite3
import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglang_april.wire import FinishedSample, OpenRound, Prompt, Restored, RoundEnded, Span


class Chunk(msgspec.Struct, array_like=True):
    """Consecutive output tokens of an unfinished sample, in the order in which they were drawn."""

    output_ids: bytes
    """int32 [tokens]."""
    logprobs: bytes
    """float32 [tokens]."""
    spans: list[Span]
    """All spans of the sample up to the end of this chunk."""
    order: int
    """Admission order of the sample."""
    top_logprobs: list[list[tuple[float, int]]] | None = None


class SavedSample(msgspec.Struct, array_like=True):
    """A sample of an undelivered group: finished, or with the tokens it had at its last record."""

    index: int
    chunk: Chunk | None = None
    finished: FinishedSample | None = None
    step: int = 0


class SavedGroup(msgspec.Struct, array_like=True):
    gid: int
    run: str
    incarnation: int
    prompt: Prompt
    params: bytes
    samples: list[SavedSample]
    """The undelivered ones."""


class SavedRound(msgspec.Struct, array_like=True):
    """A round that was open; its prompts are among the groups."""

    spec: OpenRound
    number: int


class SavedReply(msgspec.Struct, array_like=True):
    """A reply that is kept, with all that it says."""

    spec: OpenRound
    ended: RoundEnded
    prompts: list[Prompt]
    """One per entry of `ended.deliver`."""
    samples: list[FinishedSample]


@dataclass(eq=False)
class Saved:
    version: int | None = None
    groups: list[SavedGroup] = field(default_factory=list)
    rounds: list[SavedRound] = field(default_factory=list)
    replies: list[SavedReply] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Ids of rounds whose replies are no longer kept."""
    ids: list[tuple[str, str, int]] = field(default_factory=list)
    """(run, prompt id, next incarnation)."""
    rounds_opened: dict[str, int] = field(default_factory=dict)
    corrupt: int = 0
    """Records that did not verify; their tokens are drawn again."""


class CorruptRecordError(ValueError):
    """A record whose checksum does not match."""


def seal(value: Any) -> bytes:
    """msgpack behind its CRC-32."""
    body = msgspec.msgpack.encode(value)
    return zlib.crc32(body).to_bytes(4, "little") + body


def unseal(blob: bytes, kind: Any) -> Any:
    """What `seal` was given.

    Raises:
        CorruptRecordError: the blob is not what was written.
    """
    body = blob[4:]
    if len(blob) < 4 or zlib.crc32(body) != int.from_bytes(blob[:4], "little"):
        raise CorruptRecordError
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise CorruptRecordError from error


def read_saved(db: sqlite3.Connection) -> Saved:
    """Read a journal back. A damaged record costs what it held, never more, and is counted in `corrupt`."""
    saved = Saved()
    row = db.execute("SELECT value FROM meta WHERE key='version'").fetchone()
    saved.version = row[0] if row else None
    saved.ids = db.execute("SELECT run, id, next FROM ids").fetchall()
    saved.rounds_opened = dict(db.execute("SELECT run, max(number) FROM rounds GROUP BY run"))
    rows = db.execute("SELECT gid, run, incarnation, n, prompt, params FROM groups ORDER BY gid").fetchall()
    for gid, run, incarnation, n, prompt_blob, params_blob in rows:
        try:
            prompt, params = unseal(prompt_blob, Prompt), unseal(params_blob, bytes)
        except CorruptRecordError:
            saved.corrupt += 1
            continue
        samples = _undelivered(db, saved, gid, n)
        if samples:
            saved.groups.append(SavedGroup(gid, run, incarnation, prompt, params, samples))
    _read_rounds(db, saved)
    return saved


def _undelivered(db: sqlite3.Connection, saved: Saved, gid: int, n: int) -> list[SavedSample]:
    rows = {i: (step, body, r) for i, step, body, r in db.execute(
        "SELECT idx, step, body, round_id FROM finished WHERE gid=?", (gid,))}  # fmt: skip
    samples = []
    for index in range(n):
        step, body, round_id = rows.get(index, (0, None, None))
        if round_id is not None:
            continue
        sample = SavedSample(index, step=step)
        if body is not None:
            try:
                sample.finished = unseal(body, FinishedSample)
            except CorruptRecordError:
                saved.corrupt += 1
        if sample.finished is None:
            sample.chunk = _tokens(db, saved, gid, index)
        samples.append(sample)
    return samples


def _tokens(db: sqlite3.Connection, saved: Saved, gid: int, index: int) -> Chunk | None:
    """The chunks of a sample as one, up to the first that is missing or damaged."""
    whole: Chunk | None = None
    query = "SELECT start, body FROM chunks WHERE gid=? AND idx=? ORDER BY start"
    for start, body in db.execute(query, (gid, index)):
        try:
            chunk = unseal(body, Chunk)
        except CorruptRecordError:
            saved.corrupt += 1
            break
        if start != (len(whole.output_ids) // 4 if whole else 0):
            saved.corrupt += 1
            break
        if whole is not None:
            chunk.output_ids = whole.output_ids + chunk.output_ids
            chunk.logprobs = whole.logprobs + chunk.logprobs
            if chunk.top_logprobs is not None:
                chunk.top_logprobs = [*(whole.top_logprobs or ()), *chunk.top_logprobs]
        whole = chunk
    return whole


def _read_rounds(db: sqlite3.Connection, saved: Saved) -> None:
    for round_id, number, spec_blob, ended_blob in db.execute(
        "SELECT round_id, number, spec, ended FROM rounds ORDER BY seq"
    ).fetchall():
        if not spec_blob:
            saved.gone.append(round_id)
            continue
        try:
            spec = unseal(spec_blob, OpenRound)
            if ended_blob is None:
                saved.rounds.append(SavedRound(spec, number))
            else:
                saved.replies.append(_reply(db, spec, unseal(ended_blob, RoundEnded)))
        except CorruptRecordError:
            saved.corrupt += 1
            saved.gone.append(round_id)


def _reply(db: sqlite3.Connection, spec: OpenRound, ended: RoundEnded) -> SavedReply:
    rows = db.execute(
        "SELECT f.body, g.prompt, g.incarnation FROM finished f JOIN groups g USING(gid) WHERE f.round_id=?",
        (spec.round_id,),
    ).fetchall()
    samples = [unseal(row[0], FinishedSample) for row in rows]
    by_id: dict[tuple[str, int], Prompt] = {}
    for _, prompt_blob, incarnation in rows:
        prompt = unseal(prompt_blob, Prompt)
        by_id[prompt.id, incarnation] = prompt
    try:
        prompts = [by_id[d.id, d.incarnation] for d in ended.deliver]
    except KeyError as error:
        raise CorruptRecordError from error
    return SavedReply(spec, ended, prompts, samples)


def restored_event(saved: Saved) -> Restored:
    """What the HTTP process has to know again."""
    warnings = [f"{saved.corrupt} journal records were damaged; their tokens are drawn again"] if saved.corrupt else []
    return Restored(
        groups=[(g.run, g.prompt) for g in saved.groups],
        finished=[s.finished for g in saved.groups for s in g.samples if s.finished is not None],
        rounds=[r.spec for r in saved.rounds],
        replies=[(r.spec, r.ended, r.prompts, r.samples) for r in saved.replies],
        gone=saved.gone,
        warnings=warnings,
    )
