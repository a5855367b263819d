"""Which events wait for the journal, and what happens while the disk is full."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_april.api import messages
from sglang_april.recovery.journal import RETRY_S, Journal, JournalError
from sglang_april.recovery.model_identity import ModelIdentity
from sglang_april.recovery.outbox import Outbox
from sglang_april.recovery.schema import Op
from sglang_april.scheduler.recorder import Recorder
from tests.unit.fake_engine import FakeEngine

ANSWER, STATE = messages.Answer(1), messages.Answer(2)
FINISHED = messages.Finished([])


def ended(round_id: str = "r") -> messages.RoundEnded:
    return messages.RoundEnded(round_id, "run", 0, "quota", [], {}, {})


def test_event_waits_for_its_batch_and_later_events_wait_behind_it() -> None:
    received: list[Any] = []
    outbox = Outbox(received.append)
    outbox.send(FINISHED)
    outbox.send(ANSWER, 1)
    outbox.send(FINISHED)
    outbox.send(STATE)
    assert received == [FINISHED, STATE], "an answer that promises nothing overtakes"
    outbox.send(ended(), 2)
    outbox.release(1, {})
    assert received == [FINISHED, STATE, ANSWER, FINISHED]
    outbox.release(2, {})
    assert received[4:] == [ended()]


def test_event_of_a_written_batch_is_sent_at_once() -> None:
    received: list[Any] = []
    outbox = Outbox(received.append)
    outbox.release(3, {})
    outbox.send(ANSWER, 3)
    outbox.release(0, {})  # a later failed attempt does not undo it
    outbox.send(STATE, 2)
    assert received == [ANSWER, STATE]


class ReceivedEvents:
    """Sent events, from either thread."""

    def __init__(self) -> None:
        self.events: list[messages.Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: messages.Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[messages.Event]], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.events), 60)

    def of(self, kind: type[messages.Event]) -> list[messages.Event]:
        return [event for event in self.events if isinstance(event, kind)]


class SmallDisk(Journal):
    """A journal that cannot grow until it `has_space`.

    Only the writer's thread may use the connection: an error of one thread's statement is lost in Python's sqlite3 when
    another thread's succeeds at that moment.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.has_space = threading.Event()
        self.attempts = 0
        self._limit(self._db.execute("PRAGMA page_count").fetchone()[0])

    def _limit(self, pages: int) -> None:
        self._db.execute(f"PRAGMA max_page_count={pages}")

    def _transaction(self, ops: list[Op]) -> str:
        self.attempts += 1
        if self.has_space.is_set():
            self._limit(1_000_000)
        return super()._transaction(ops)


def test_a_full_disk_is_tried_twice_a_second_however_many_batches_arrive(tmp_path: Path) -> None:
    """Every attempt repeats all records that wait, on a core that the scheduler needs."""
    journal = SmallDisk(tmp_path / "j")
    journal.start()
    full: Op = lambda db: db.execute("INSERT OR REPLACE INTO chunks VALUES(0,0,0,zeroblob(100000))")  # noqa: E731
    journal.put([full])
    while not journal.error:
        time.sleep(0.001)
    tried, began = journal.attempts, time.monotonic()
    for _ in range(200):
        journal.put([full])
        time.sleep(0.0005)
    assert journal.attempts <= tried + 1 + (time.monotonic() - began) / RETRY_S
    journal.has_space.set()
    journal.close()
    assert journal.state()["waiting"] == 0


def test_a_restart_on_a_full_disk_recognizes_its_model(tmp_path: Path) -> None:
    model = ModelIdentity("model", {"dtype": "bfloat16"})
    journal = Journal(tmp_path / "j")
    journal.claim(model)
    journal.close()
    again = SmallDisk(tmp_path / "j")
    again._db.execute("PRAGMA query_only=1")  # any write fails, as on a full disk
    again.claim(model)
    with pytest.raises(JournalError, match="cannot be used"):
        again.claim(ModelIdentity("elsewhere", model.properties))
    again.close()


def test_full_disk_holds_back_only_events_with_records(tmp_path: Path) -> None:
    """Generation continues, queries are answered, the fault is reported; with space again all events leave in order."""
    engine, received = FakeEngine(), ReceivedEvents()
    engine.on_event = received
    journal = SmallDisk(tmp_path / "j")
    controller, recorder = engine.controller, Recorder(engine, journal)
    controller.context.recorder = recorder
    prompt = messages.Prompt("p", bytes(12), 1, 0, 0, metadata=bytes(50_000))
    params = [msgspec.msgpack.encode(-30)]
    controller.command(messages.OpenRound(1, messages.RoundSpec("r", "run", 1, "group", "keep", 5), [prompt], params))
    received.wait(lambda events: any(isinstance(e, messages.JournalFault) for e in events))
    for _ in range(60):
        engine.step()
    assert controller.context.ledger.runs["run"].groups == {}, "the sample has finished and its round has ended"
    controller.command(messages.GetState(2))
    assert [e.seq for e in received.of(messages.Answer)] == [2]
    assert not received.of(messages.RoundEnded)
    (fault,) = received.of(messages.JournalFault)
    assert "database or disk is full" in fault.reason
    journal.has_space.set()
    received.wait(lambda events: len(events) == 6)
    assert [type(e) for e in received.events] == [
        messages.JournalFault,
        messages.Answer,
        messages.Answer,
        messages.Finished,
        messages.RoundEnded,
        messages.JournalFault,
    ]
    assert received.of(messages.JournalFault)[1].reason == ""
    recorder.close()
