"""Trajectories in the journal: their records, verdicts and rounds survive the death of the server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_april.api import messages
from sglang_april.http.trajectories import TrajectoryRecords
from sglang_april.recovery.journal_snapshot import JournalSnapshot
from sglang_april.scheduler.attached_journal import saved_requests, tokens_of
from sglang_april.scheduler.controller import COUNT_EVERY
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import restored_event
from tests.unit.crashing_harness import PromptJournal
from tests.unit.journal_fixtures import query
from tests.unit.leg_harness import PROMPT, LegHarness


class JournalledLegs(LegHarness):
    """One server after the other with the same journal; the client is the same."""

    def __init__(self, path: Path, overlap: bool) -> None:
        self.path, self.kind = path, {"overlap": overlap, "slots": 4}
        self.records = TrajectoryRecords()
        """As the HTTP process has them."""
        super().__init__(1, **self.kind)
        self._take_over()

    def _take_over(self) -> None:
        journal = PromptJournal(self.path)
        self.saved: JournalSnapshot = journal.load()
        self.records.restore(restored_event(self.saved, unnamed=False).trajectories)
        self.context.clock.version = self.engine.version = self.saved.version
        self.engine.controller.restore(self.saved)
        self.recorder = Recorder(self.engine, journal, 4, self.saved.attached)
        self.context.recorder = self.recorder
        self.step()

    def _receive(self, replica: int, event: messages.Event) -> None:
        super()._receive(replica, event)
        if isinstance(event, messages.LegEnded):
            self.records.add(event)

    def crash(self) -> None:
        """Kill the server: what the last step has not written is lost."""
        self.recorder._records = []
        self.recorder.close()
        before, rids, seq = self.legs, self.rids, self.seq
        self.records = TrajectoryRecords()
        super().__init__(1, **self.kind)
        self.before, self.rids, self.seq = before, rids, seq
        """Legs that the client knows of, by `rid`."""
        self._take_over()

    def before_sequence(self, rid: str) -> list[int]:
        """Prompt and output of a leg that ended before the crash."""
        return [*self.rids[rid], *np.frombuffer(self.before[rid].result.output_ids, "<i4").tolist()]

    def record(self, name: str) -> dict[str, Any]:
        known = self.records.get("run", name)
        assert known is not None
        return dict(msgspec.json.decode(msgspec.json.encode(known.fields(packed=False))))


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def w(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JournalledLegs]:
    harness = JournalledLegs(tmp_path / "journal", request.param)
    yield harness
    harness.recorder.close()


def begin(w: JournalledLegs) -> dict[str, dict[str, Any]]:
    """An open round; `a` has two legs and a branch, `b` is done, `c` and the unknown `e` are rejected, `d` draws.

    Returns the records.
    """
    assert w.open("run", 3).status == 200
    for name in "abc":
        w.leg("run", f"{name}0", PROMPT, 4, name)
    w.step(8)
    w.leg("run", "a1", [*w.sequence("a0"), 1], 3, "a")
    w.step(6)
    w.leg("run", "a2", [*w.sequence("a0")[:5], 2], 3, "a")
    w.step(6)
    w.done("run", "b", reject=("c", "e"))
    w.leg("run", "d0", PROMPT, 40, "d")
    w.step(COUNT_EVERY + 8)  # until a count has recorded it
    assert w.running() == {"d0"}
    w.recorder.commit()
    return {name: w.record(name) for name in "ab"}


def test_records_verdicts_and_the_round_are_restored(w: JournalledLegs) -> None:
    before = begin(w)
    old = w.context.trajectories["run"].active["a"]
    w.crash()
    assert {name: w.record(name) for name in "ab"} == before
    (rnd,) = w.context.rounds.values()
    assert (rnd.spec.round_id, rnd.spec.quota, rnd.counted()) == ("r0", 3, 1)
    run = w.context.trajectories["run"]
    assert (list(run.active), [t.id for t in run.done], list(run.rejected)) == (["a", "b", "d"], ["b"], ["c"])
    new = run.active["a"]
    assert [(s.ids.tolist(), s.legs) for s in new.sequences] == [(s.ids.tolist(), s.legs) for s in old.sequences]
    assert (new.legs, new.mismatches, new.tokens, new.oldest) == (3, 1, 10, 0)
    assert not w.leg("run", "e0", PROMPT, 2, "e"), "rejected before its first request"
    repeated = w.done("run", "b", reject=("c", "e"))
    assert (repeated.status, repeated.data["new"]) == (200, {})
    assert w.done("run", "c").status == 409
    assert not w.leg("run", "late", PROMPT, 2, "b")


def test_a_leg_that_is_asked_again_continues_and_the_round_ends(w: JournalledLegs) -> None:
    begin(w)
    w.crash()
    w.leg("run", "d0", PROMPT, 40, "d")
    (sample,) = w.context.trajectories["run"].active["d"].pending
    assert sample.length >= 4
    w.step(50)
    leg = w.ended("d0")
    assert leg is not None
    assert (leg.number, len(leg.result.output_ids)) == (0, 160)
    w.leg("run", "a3", [*w.before_sequence("a1"), 9], 2, "a")
    w.step(6)
    third = w.ended("a3")
    assert third is not None
    assert (third.number, third.parent) == (3, 1)
    w.done("run", "d", "a")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.trajectories, reply.rejected) == (["b", "d", "a"], ["c"])
    w.crash()
    (kept,) = w.saved.replies
    assert [(t.id, len(t.legs)) for t in kept.trajectories] == [("b", 1), ("d", 1), ("a", 4)]
    assert not w.context.rounds
    assert not w.context.trajectories["run"].active
    assert w.done("run", "d").data["new"] == {}
    w.command(messages.DeleteReply, round_id="r0")
    w.crash()
    assert not w.saved.replies
    assert query_legs(w) == 0
    assert w.done("run", "d").status == 200, "its id is still known"


def test_of_a_reply_that_is_no_longer_kept_only_ids_are_remembered(w: JournalledLegs) -> None:
    """The caller's metadata can be large, and 65,536 ids are remembered."""
    assert w.open("run", 1).status == 200
    w.leg("run", "a0", PROMPT, 4, "a")
    w.step(8)
    result = msgspec.msgpack.encode({"reward": 1.0, "metadata": "x" * 10_000})
    w.command(messages.EndTrajectories, run="run", done={"a": result}, reject=[])
    w.crash()
    (kept,) = w.saved.replies
    assert kept.trajectories[0].result == result
    w.command(messages.DeleteReply, round_id="r0")
    w.crash()
    (size,) = w.recorder._journal._db.execute("SELECT length(body) FROM trajectories").fetchone()
    assert size < 100
    assert w.done("run", "a").data["new"] == {}, "its id is still known"


def query_legs(w: JournalledLegs) -> int:
    return int(w.recorder._journal._db.execute("SELECT count(*) FROM legs").fetchone()[0])


def test_a_leg_whose_answer_was_lost_is_not_recorded_twice(w: JournalledLegs) -> None:
    begin(w)
    before = w.record("a")
    w.crash()
    again = [*w.before_sequence("a0"), 1]
    w.leg("run", "a1", again, 3, "a")
    (answered,) = w.answered()
    assert answered.rid == "a1"
    assert not w.of(messages.LegEnded)
    assert w.record("a") == before
    assert w.context.trajectories["run"].active["a"].legs == 3


def test_a_dropped_trajectory_does_not_come_back(w: JournalledLegs) -> None:
    begin(w)
    w.command(messages.Drop, run="run", ids=None)
    w.crash()
    assert not w.context.trajectories["run"].active
    assert query_legs(w) == 0


def test_a_forgotten_run_does_not_come_back(w: JournalledLegs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the ids of its trajectories that had ended."""
    monkeypatch.setattr("sglang_april.scheduler.trajectory_ends.MAX_RUNS", 1)
    for name in ("left", "rejected"):
        w.leg("old", name, PROMPT, 2, name)
    w.step(6)
    w.done("old", reject=("rejected",))
    w.leg("new", "r", PROMPT, 2, "t")
    w.step(6)
    w.crash()
    assert list(w.context.trajectories) == ["new"]


def test_of_rejected_trajectories_the_last_ones_are_remembered(
    w: JournalledLegs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without rounds has no reply that names them; one that opens a round later names those that are left."""
    monkeypatch.setattr("sglang_april.scheduler.trajectory_run.MAX_ENDED", 2)
    monkeypatch.setattr("sglang_april.recovery.journal_trajectories.REMEMBERED", 3)
    for i in range(7):
        w.leg("run", f"r{i}", PROMPT, 2, f"t{i}")
        w.step(6)
        w.done("run", reject=(f"t{i}", f"unknown{i}"))
    assert list(w.context.trajectories["run"].rejected) == ["t6"]
    w.crash()
    (rows,) = w.recorder._journal._db.execute("SELECT count(*) FROM trajectories").fetchone()
    assert rows == 3
    assert list(w.context.trajectories["run"].rejected) == ["t6"]
    assert w.done("run", "t6").status == 409, "it is still known that it was rejected"


def test_damage_costs_an_active_trajectory_its_later_legs_and_a_done_one_itself(w: JournalledLegs) -> None:
    begin(w)
    w.recorder.close()
    query(w.path, "UPDATE legs SET body=x'00' WHERE id='b' OR (id='a' AND number=1)")
    w.recorder = Recorder(w.engine, PromptJournal(w.path), 4)
    w.crash()
    assert w.saved.corrupt == 2
    run = w.context.trajectories["run"]
    assert list(run.active) == ["a", "d"]
    assert [leg["leg"] for leg in w.record("a")["legs"]] == [0]
    assert w.done("run", "b").status == 404
    w.crash()
    assert w.saved.corrupt == 0


def test_a_done_leg_is_recorded_before_its_answer(w: JournalledLegs) -> None:
    """`journal-before-reply`: what a caller has seen of a leg is in the record after any crash."""
    w.open("run", None)
    w.leg("run", "a", PROMPT, 3, "a")
    while not w.answered():
        assert not w.of(messages.LegEnded)
        w.step()
    w.crash()
    assert [leg["rid"] for leg in w.record("a")["legs"]] == ["a"]
    assert w.record("a")["legs"][0]["logprobs"] == [-1.0] * 3


def test_an_aborted_leg_is_written_under_a_pause(w: JournalledLegs) -> None:
    """No step follows that would write it: its answer would wait, and a kill would lose it."""
    w.leg("run", "a", PROMPT, 9, "t")
    w.step(3)
    w.do(lambda e: e.controller.freeze())
    w.abort("a")
    assert w.ended("a") is not None
    w.crash()
    (leg,) = w.record("t")["legs"]
    assert (leg["rid"], leg["finish_reason"]) == ("a", {"type": "abort"})


def test_a_request_survives_its_clients_disconnect_while_the_server_shuts_down(w: JournalledLegs) -> None:
    """SIGTERM often reaches a server and its clients at once."""
    w.leg("run", "a", PROMPT, 9, "t")
    w.step(3)
    w.command(messages.Shutdown, store=False)
    w.abort("a")
    w.crash()
    assert [rid for (_, rid), group in saved_requests(w.saved).items() if tokens_of(group).length] == ["a"]
    assert not w.record("t")["legs"]


def test_a_repeated_message_changes_nothing_for_what_left_with_its_group(w: JournalledLegs) -> None:
    """The answer to the message that ended the round was lost."""
    w.open("run", 1, quota_unit="group", n=2)
    for name in "abc":
        w.leg("run", name, PROMPT, 2, name, "g")
    w.step(8)
    w.done("run", *"abc")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.trajectories, reply.rejected) == (["a", "b"], ["c"])
    for crash in (False, True):
        if crash:
            w.crash()
        repeated = w.done("run", *"abc")
        assert (repeated.status, repeated.data and repeated.data["new"]) == (200, {})
    assert not w.context.trajectories["run"].rejected


def test_a_kept_reply_outlives_its_run(w: JournalledLegs, monkeypatch: pytest.MonkeyPatch) -> None:
    """More other runs have begun than are remembered."""
    monkeypatch.setattr("sglang_april.scheduler.trajectory_ends.MAX_RUNS", 2)
    w.open("run", 1)
    w.leg("run", "a", PROMPT, 2, "t")
    w.step(6)
    w.done("run", "t")
    for other in "xyz":
        w.leg(other, f"leg-{other}", PROMPT, 2, "t")
        w.step(6)
    assert "run" not in w.context.trajectories
    w.crash()
    assert w.saved.corrupt == 0
    assert [(t.id, len(t.legs)) for reply in w.saved.replies for t in reply.trajectories] == [("t", 1)]
