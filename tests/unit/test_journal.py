"""The journal on its own: records are read back as they were written, and nothing else."""

import contextlib
import errno
import os
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_april.api.messages import Delivery, RoundEnded
from sglang_april.recovery import schema
from sglang_april.recovery.journal import Journal, JournalError, probe
from sglang_april.recovery.journal_snapshot import Chunk
from tests.unit.crashing_harness import PromptJournal
from tests.unit.journal_fixtures import accept, chunk, ended, finish_both, ids, query, read, request, sample, written


def test_chunks_are_joined_on_reading(tmp_path: Path) -> None:
    more = msgspec.structs.replace(chunk(7, start=2), proximal=(3, [(0, ids(1))]))
    path = written(
        tmp_path / "j",
        accept(0, request("a", "p", "q")),
        schema.admitted(0, 1, 12, 4),
        schema.tokens(0, 1, 0, chunk(5, 6)),
        schema.tokens(0, 1, 2, more),
        schema.version(4),
    )
    saved = read(path)
    assert (saved.version, [r.spec.round_id for r in saved.rounds], saved.corrupt) == (4, ["a"], 0)
    first, second = saved.groups
    queued, partial = first.samples
    assert (queued.index, queued.chunk, queued.queue_position) == (0, None, -1)
    assert (partial.queue_position, partial.number) == (12, 4)
    assert partial.chunk == msgspec.structs.replace(chunk(5, 6, 7), proximal=(3, [(0, ids(1))]))
    assert second.prompt.id == "q"
    assert (saved.ids, saved.next_gid) == ([("run", "p", 1), ("run", "q", 1)], 2)


def test_finished_sample_appends_only_new_tokens(tmp_path: Path) -> None:
    whole = sample("p", 0, 5, 6, 7, 1)
    tail = msgspec.structs.replace(
        whole, output_ids=ids(7, 1), logprobs=whole.logprobs[8:], top_logprobs=whole.top_logprobs[2:]
    )
    path = written(
        tmp_path / "j",
        accept(0, request("a", "p")),
        schema.tokens(0, 0, 0, msgspec.structs.replace(chunk(5, 6), logprobs=whole.logprobs[:8])),
        schema.finished(0, 2, 9, tail),
    )
    (group,) = read(path).groups
    assert (group.samples[0].finished, group.samples[0].chunk, group.samples[0].step) == (whole, None, 9)


def test_delivered_samples_are_deleted_with_their_reply(tmp_path: Path) -> None:
    path = written(
        tmp_path / "j", accept(0, request("a", "p", "q")), *finish_both(0, "p"), schema.ended(ended("a", "p"))
    )
    saved = read(path)
    assert [g.prompt.id for g in saved.groups] == ["q"]
    (reply,) = saved.replies
    assert [s.output_ids for s in reply.samples] == [ids(5, 1)] * 2
    assert [p.id for p in reply.prompts] == ["p"]
    assert saved.rounds == []


def test_replies_are_kept_until_the_http_process_deletes_them(tmp_path: Path) -> None:
    records = []
    for gid, (name, held) in enumerate([("a", False), ("b", True), ("c", False)]):
        p = f"p{gid}"
        records += [accept(gid, request(name, p, held=held)), *finish_both(gid, p), schema.ended(ended(name, p))]
    saved = read(written(tmp_path / "j", *records, schema.reply_deleted("a")))
    assert [(r.spec.round_id, r.acknowledged) for r in saved.replies] == [("b", False), ("c", False)]
    assert saved.gone == ["a"]
    saved = read(written(tmp_path / "j", schema.acknowledged("b")))
    assert [(r.spec.round_id, r.acknowledged) for r in saved.replies] == [("b", True), ("c", False)]
    path = written(tmp_path / "j", schema.reply_deleted("b"))
    saved = read(path)
    assert ([r.spec.round_id for r in saved.replies], saved.gone, saved.groups) == (["c"], ["a", "b"], [])
    left = [query(path, f"SELECT count(*) FROM {t}")[0] for t in ("groups", "finished", "chunks")]
    assert left == [1, 2, 0], "only the kept reply's group is there"


def test_dropped_groups_are_not_restored(tmp_path: Path) -> None:
    records = [accept(0, request("a", "p", "q")), schema.tokens(0, 0, 0, chunk(5)), schema.dropped([0])]
    saved = read(written(tmp_path / "j", *records))
    assert [g.prompt.id for g in saved.groups] == ["q"]
    assert ("run", "p", 1) in saved.ids, "a dropped id still counts its incarnations"


def test_a_group_that_is_dropped_after_a_part_of_it_was_delivered(tmp_path: Path) -> None:
    part = RoundEnded("a", "run", 0, "quota", [Delivery("p", 0, [1], False)], {}, {})
    delivered = schema.finished(0, 0, 3, sample("p", 1, 5))
    path = written(tmp_path / "j", accept(0, request("a", "p")), delivered, schema.ended(part), schema.dropped([0]))
    saved = read(path)
    assert (saved.groups, [s.index for s in saved.replies[0].samples]) == ([], [1])
    read(written(path, schema.reply_deleted("a")))
    assert query(path, "SELECT count(*) FROM groups") == (0,)


def test_the_ids_of_the_oldest_rounds_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "REMEMBERED", 3)
    records = []
    for i in range(8):
        records += [accept(i, request(f"r{i}")), schema.ended(ended(f"r{i}")), schema.reply_deleted(f"r{i - 1}")]
    path = written(tmp_path / "j", *records)
    saved = read(path)
    assert ([r.spec.round_id for r in saved.replies], saved.gone) == (["r7"], ["r5", "r6"])
    again = read(written(path, accept(8, request("r5"))))
    assert [r.spec.round_id for r in again.rounds] == ["r5"], "the HTTP process had already forgotten the id"


def test_forgotten_ids_are_deleted_and_the_others_keep_their_order(tmp_path: Path) -> None:
    def take(gid: int, round_id: str, name: str, incarnation: int, *forgotten: schema.ForgottenIds) -> schema.Op:
        opened = request(round_id, name)
        return schema.accepted(opened.spec, 1, [(gid, incarnation, opened.prompts[0], b"params")], forgotten)

    records = [take(0, "a", "p", 0), take(1, "b", "q", 0), take(2, "c", "p", 1), take(3, "d", "r", 0)]
    path = written(tmp_path / "j", *records)
    assert read(path).ids == [("run", "q", 1), ("run", "p", 2), ("run", "r", 1)]
    written(path, take(4, "e", "s", 0, ("run", ["q", "p"], 2)))
    assert read(path).ids == [("run", "r", 1), ("run", "s", 1), ("run", "", 2)]
    written(path, take(5, "f", "t", 0, ("run", None, 0)))
    assert read(path).ids == []


def test_an_incarnation_that_comes_back_in_a_forgotten_run_is_another_group(tmp_path: Path) -> None:
    """The first one is still in a kept reply."""
    first = [accept(0, request("a", "p")), *finish_both(0, "p"), schema.ended(ended("a", "p"))]
    again = [accept(1, request("b", "p")), *finish_both(1, "p")]
    path = written(tmp_path / "j", *first, *again)
    saved = read(path)
    assert ([r.spec.round_id for r in saved.replies], [g.gid for g in saved.groups]) == (["a"], [1])
    saved = read(written(path, schema.ended(ended("b", "p"))))
    assert ([r.spec.round_id for r in saved.replies], saved.groups) == (["a", "b"], [])


# --- files that cannot be used


@pytest.mark.parametrize(
    ("path", "reason"), [("missing/folder/j", "its folder does not exist"), (".", "unable to open database file")]
)
def test_an_unusable_path_is_one_sentence(tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(JournalError, match=f"the journal .* cannot be used: {reason}"):
        probe(tmp_path / path)


def test_foreign_file_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "j").write_text("precious " * 1000)
    with pytest.raises(JournalError, match="not a database"):
        probe(tmp_path / "j")
    assert (tmp_path / "j").read_text() == "precious " * 1000


def test_a_database_of_another_program_is_refused_and_unchanged(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "j")) as db:
        db.execute("CREATE TABLE precious(x)")
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(JournalError, match="no such table"):
        probe(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == before


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "j")
    query(path, "UPDATE meta SET value=99 WHERE key='schema'")
    with pytest.raises(JournalError, match=f"schema 99, and this version writes {schema.SCHEMA}"):
        probe(path)


def test_two_servers_on_one_journal_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Journal(tmp_path / "j")
    plain = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: plain(*args, **kwargs, timeout=0.1))
    with pytest.raises(JournalError, match="in use by another server"):
        probe(tmp_path / "j")
    first.close()
    probe(tmp_path / "j")


def as_nobody(act: Callable[[], None]) -> int:
    """Exit status of `act` in a process without the rights of root, for whom no file is read-only."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_read_only_journal_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder) / "j")
        Path(folder).chmod(0o755)
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)

        def refused() -> None:
            with pytest.raises(JournalError, match="is read-only"):
                probe(path)

        assert as_nobody(refused) == 0


# --- the writer


def test_full_disk_is_reported_and_the_write_retried(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    reported: list[tuple[int, str]] = []
    states: list[dict[str, Any]] = []
    again = threading.Event()
    limit = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={limit}")
    full = Chunk(bytes(10**6), b"", [])

    def hear(last: int, _failed: Mapping[int, str]) -> None:
        reported.append((last, journal.error))
        states.append(journal.state())
        if len(reported) == 2:  # in the writer's thread: space is freed
            journal._db.execute("PRAGMA max_page_count=1000000")
        if not journal.error:
            again.set()

    journal.start(hear)
    assert journal.put([accept(0, request("a", "p")), schema.tokens(0, 0, 0, full)]) == 1
    assert journal.put([schema.version(3)]) == 2
    assert again.wait(60)
    journal.close()
    assert reported[:2] == [(0, "the journal cannot be written: database or disk is full")] * 2
    assert reported[-1] == (2, "")
    assert states[0]["fault"] == reported[0][1]
    assert states[0]["waiting"] >= 1
    assert states[0]["lag_s"] > 0
    assert (states[-1]["fault"], states[-1]["waiting"], states[-1]["lag_s"]) == ("", 0, 0.0)
    assert states[-1]["bytes"] > len(full.output_ids) > states[0]["bytes"]
    saved = read(tmp_path / "j")
    assert (saved.version, saved.groups[0].samples[0].chunk) == (3, full)


def test_a_disk_that_fails_does_not_end_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would end with it."""
    journal = Journal(tmp_path / "j")
    failing, again = threading.Event(), threading.Event()
    reported: list[tuple[int, str]] = []
    real = Path.stat

    def fail(path: Path, **options: Any) -> Any:
        if failing.is_set() and path.name == "j":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **options)

    def once(_: sqlite3.Connection) -> None:
        if failing.is_set():
            raise sqlite3.OperationalError("disk I/O error")

    def hear(last: int, _failed: Mapping[int, str]) -> None:
        reported.append((last, journal.error))
        failing.clear()
        if not journal.error:
            again.set()

    monkeypatch.setattr(Path, "stat", fail)
    journal.start(hear)
    failing.set()
    journal.put([once, schema.version(3)])
    assert again.wait(60)
    journal.close()
    assert reported[:2] == [(0, "the journal cannot be written: disk I/O error"), (1, "")]
    assert read(tmp_path / "j").version == 3


def test_batch_is_written_atomically(tmp_path: Path) -> None:
    journal = PromptJournal(tmp_path / "j")

    def fails(db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    assert "disk I/O error" in journal._transaction([accept(0, request("a", "p")), fails])
    journal.close()
    assert read(tmp_path / "j").groups == []
