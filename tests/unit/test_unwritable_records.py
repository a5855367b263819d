"""A journal record that can never be written fails its own round, and nothing else waits for it."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_april.api import messages
from sglang_april.recovery import journal_trajectories, schema
from sglang_april.recovery.journal import Journal
from sglang_april.scheduler.recorder import Recorder
from tests.unit.fake_engine import FakeEngine
from tests.unit.journal_fixtures import accept, read, request
from tests.unit.test_outbox import ReceivedEvents


class EngineWithJournal:
    """The fake engine with a real journal."""

    def __init__(self, path: Path) -> None:
        self.engine, self.received = FakeEngine(), ReceivedEvents()
        self.engine.on_event = self.received
        self.controller = self.engine.controller
        self.recorder = self.controller.context.recorder = Recorder(self.engine, Journal(path))
        self.seq = 0

    def issue(self, kind: type[messages.Command], **fields: Any) -> int:
        self.seq += 1
        self.controller.command(kind(seq=self.seq, **fields))
        return self.seq

    def open(self, run: str, round_id: str, *names: str, length: int = 3, metadata: bytes = b"") -> int:
        prompts = [messages.Prompt(name, bytes(12), 1, 0, 0, metadata=metadata) for name in names]
        spec = messages.RoundSpec(round_id, run, 1, "group", "keep", 5)
        return self.issue(messages.OpenRound, spec=spec, prompts=prompts, params=[msgspec.msgpack.encode(-length)])

    def answer(self, seq: int) -> messages.Answer:
        def answers() -> list[messages.Answer]:
            return [a for a in self.received.of(messages.Answer) if a.seq == seq]

        self.received.wait(lambda _: answers())
        return answers()[0]

    def replies(self, count: int) -> list[messages.RoundEnded]:
        for _ in range(60):
            self.engine.step()
        self.received.wait(lambda _: len(self.received.of(messages.RoundEnded)) >= count)
        return self.received.of(messages.RoundEnded)


def test_a_reused_round_id_fails_its_own_round_only(tmp_path: Path) -> None:
    server = EngineWithJournal(tmp_path / "j")
    server.open("first", "same", "a", length=90)
    refused = server.answer(server.open("second", "same", "b"))
    assert (refused.status, refused.field) == (500, "journal")
    assert "UNIQUE" in refused.reason
    assert server.answer(server.open("third", "other", "c")).status == 200
    server.answer(server.issue(messages.Drop, run="second", ids=["b"], round_id="same"))
    assert [r.round_id for r in server.replies(1)] == ["other"]
    assert [r.spec.run for r in server.controller.context.rounds.values()] == ["first"]
    assert server.answer(server.open("second", "new", "b")).status == 200
    assert not server.received.of(messages.JournalFault)
    server.recorder.close()
    saved = read(tmp_path / "j")
    assert [r.spec.round_id for r in saved.rounds] == ["same", "new"]
    assert [(g.run, g.prompt.id) for g in saved.groups] == [("first", "a"), ("second", "b")]


def test_a_record_beyond_the_limit_of_sqlite_fails_its_own_round_only(tmp_path: Path) -> None:
    server = EngineWithJournal(tmp_path / "j")
    server.recorder._journal._db.setlimit(0, 10**6)  # SQLITE_LIMIT_LENGTH, 10^9 by default
    refused = server.answer(server.open("big", "big", "a", metadata=bytes(2 * 10**6)))
    assert (refused.status, refused.reason) == (500, "the journal cannot store it: string or blob too big")
    assert server.answer(server.open("small", "small", "b")).status == 200
    server.recorder.close()


def test_a_reply_that_lacks_a_sample_in_the_journal_fails_its_own_round_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the sample would be delivered again after a restart (`delivered-once`)."""
    real = schema.finished

    def finished(gid: int, start: int, step: int, tail: messages.FinishedSample) -> schema.Op:
        return unwritable if tail.id == "a" else real(gid, start, step, tail)

    def unwritable(_db: Any) -> None:
        raise sqlite3.DataError("string or blob too big")

    monkeypatch.setattr(schema, "finished", finished)
    server = EngineWithJournal(tmp_path / "j")
    server.open("bad", "bad", "a")
    server.open("good", "good", "b")
    errors = {r.round_id: r.error for r in server.replies(2)}
    assert "lacks" in errors["bad"]
    assert errors["good"] == ""
    server.recorder.close()
    saved = read(tmp_path / "j")
    assert [r.spec.round_id for r in saved.rounds] == ["bad"], "it is open again and delivers its sample"
    assert [g.prompt.id for g in saved.groups] == ["a"]


def test_a_leg_that_is_not_in_the_journal_fails_its_own_round_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a restarted server would have another record than the reply."""
    real = journal_trajectories.leg

    def unwritable(_db: Any) -> None:
        raise sqlite3.DataError("string or blob too big")

    monkeypatch.setattr(
        journal_trajectories, "leg", lambda event: unwritable if event.trajectory == "bad" else real(event)
    )
    server = EngineWithJournal(tmp_path / "j")
    for name in ("bad", "good"):
        spec = messages.RoundSpec(name, name, 1, "trajectory", "keep", 5, trajectories=True)
        assert server.answer(server.issue(messages.OpenRound, spec=spec, prompts=[], params=[])).status == 200
        server.engine.attach_request(name, name, [1, 2, 3], 2, name)
        server.replies(0)
        assert (
            server.answer(server.issue(messages.EndTrajectories, run=name, done={name: b""}, reject=[])).status == 200
        )
    errors = {r.round_id: r.error for r in server.replies(2)}
    assert "lacks" in errors["bad"]
    assert errors["good"] == ""
    server.recorder.close()
    saved = read(tmp_path / "j")
    assert [r.spec.round_id for r in saved.rounds] == ["bad"]
    assert [(t.id, t.state) for t in saved.trajectories] == [("bad", "done"), ("good", "left")]


def test_a_round_of_trajectories_that_cannot_be_journalled_is_undone(tmp_path: Path) -> None:
    server = EngineWithJournal(tmp_path / "j")
    server.open("first", "same", "a", length=90)
    spec = messages.RoundSpec("same", "agents", 1, "trajectory", "keep", 5, trajectories=True)
    refused = server.answer(server.issue(messages.OpenRound, spec=spec, prompts=[], params=[]))
    assert (refused.status, refused.field) == (500, "journal")
    server.answer(server.issue(messages.Drop, run="agents", ids=[], round_id="same"))
    assert [r.spec.run for r in server.controller.context.rounds.values()] == ["first"]
    server.recorder.close()


def test_the_end_of_a_push_is_answered_once_its_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a crash in between would revert a version that the trainer relies on."""
    real, gate = schema.version, threading.Event()

    def gated(number: int) -> schema.Op:
        write = real(number)
        return lambda db: gate.wait(10) and write(db)

    server = EngineWithJournal(tmp_path / "j")
    monkeypatch.setattr(schema, "version", gated)
    server.issue(messages.PushBegin)
    ended = server.issue(messages.PushEnd)
    state = server.issue(messages.GetState)
    assert server.answer(state).status == 200
    assert ended not in [answer.seq for answer in server.received.of(messages.Answer)]
    gate.set()
    assert server.answer(ended).data == {"policy_version": 1}
    server.recorder.close()
    assert read(tmp_path / "j").version == 1


def test_other_records_of_the_same_transaction_are_written(tmp_path: Path) -> None:
    written: list[tuple[int, str, dict[int, str]]] = []
    journal = Journal(tmp_path / "j")

    def unwritable(_db: sqlite3.Connection) -> None:
        raise TypeError("not a number")

    gate = threading.Event()
    journal.put([lambda _db: gate.wait(10)])
    journal.put([schema.version(3), unwritable])
    journal.put([accept(0, request("a", "p"))])
    journal.start(lambda last, failed: written.append((last, journal.error, dict(failed))))
    gate.set()
    journal.close()
    assert written[-1][:2] == (3, "")
    assert {b: r for _, _, failed in written for b, r in failed.items()} == {
        2: "the journal cannot store it: not a number"
    }
    saved = read(tmp_path / "j")
    assert (saved.version, [g.prompt.id for g in saved.groups]) == (3, ["p"])
