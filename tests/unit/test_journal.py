"""The journal on its own (S8): what is written comes back, and nothing else does."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from sglang_april.store.journal import Journal, JournalError
from sglang_april.store.saved import Chunk
from sglang_april.wire import Delivery, FinishedSample, OpenRound, Prompt, RoundEnded, Span


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def spec(round_id: str, *prompts: str, held: bool = False) -> OpenRound:
    asked = [Prompt(p, ids(1, 2), 2, 0, 7) for p in prompts]
    return OpenRound(1, round_id, "run", asked, [b"params"], 1, "group", "keep", 5, keep_until_ack=held)


def chunk(*values: int, start: int = 0) -> Chunk:
    end = start + len(values)
    return Chunk(ids(*values), np.zeros(len(values), "<f4").tobytes(), [Span(0, end, 0, "fresh")], 3)


def sample(prompt: str, index: int, *values: int) -> FinishedSample:
    return FinishedSample("run", prompt, 0, index, ids(*values), b"", [], {"type": "stop"}, 9)


def ended(round_id: str, *prompts: str) -> RoundEnded:
    return RoundEnded(round_id, "run", 0, "quota", [Delivery(p, 0, [0, 1], True) for p in prompts], {}, {})


def accept(journal: Journal, first_gid: int, what: OpenRound) -> None:
    journal.accepted(what, 1, [(first_gid + i, 0, p, b"params") for i, p in enumerate(what.prompts)])


def test_tokens_come_back_in_one_piece(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    accept(journal, 0, spec("a", "p", "q"))
    journal.tokens(0, 1, 0, chunk(5, 6))
    journal.tokens(0, 1, 2, chunk(7, start=2))
    journal.version(4)
    journal.close()
    saved = Journal(tmp_path / "j").load()
    assert (saved.version, [r.spec.round_id for r in saved.rounds], saved.corrupt) == (4, ["a"], 0)
    first, second = saved.groups
    assert [s.index for s in first.samples] == [0, 1]
    assert first.samples[0].chunk is None
    assert first.samples[1].chunk is not None
    assert first.samples[1].chunk.output_ids == ids(5, 6, 7)
    assert first.samples[1].chunk.spans[-1].end == 3
    assert second.prompt.id == "q"
    assert saved.ids == [("run", "p", 1), ("run", "q", 1)]


def test_finished_samples_replace_their_tokens_and_leave_with_the_reply(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    accept(journal, 0, spec("a", "p", "q"))
    journal.tokens(0, 0, 0, chunk(5))
    for index in (0, 1):
        journal.finished(0, sample("p", index, 5, 1), step=8)
    journal.ended(ended("a", "p"), [(0, 0), (0, 1)])
    journal.close()
    saved = Journal(tmp_path / "j").load()
    assert [g.prompt.id for g in saved.groups] == ["q"]
    (reply,) = saved.replies
    assert [s.output_ids for s in reply.samples] == [ids(5, 1)] * 2
    assert [p.id for p in reply.prompts] == ["p"]
    assert saved.rounds == []


def test_only_the_last_replies_and_the_unacknowledged_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", keep_replies=1)
    for gid, (name, held) in enumerate([("a", False), ("b", True), ("c", False)]):
        accept(journal, gid, spec(name, f"p{gid}", held=held))
        for index in (0, 1):
            journal.finished(gid, sample(f"p{gid}", index, 5), step=1)
        journal.ended(ended(name, f"p{gid}"), [(gid, 0), (gid, 1)])
    journal.barrier()
    saved = journal.load()
    assert [r.spec.round_id for r in saved.replies] == ["b", "c"]
    assert saved.gone == ["a"]
    journal.acknowledged("b", "run")
    journal.close()
    reopened = Journal(tmp_path / "j").load()
    assert [r.spec.round_id for r in reopened.replies] == ["c"]
    assert reopened.groups == []


def test_dropped_groups_do_not_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    accept(journal, 0, spec("a", "p", "q"))
    journal.tokens(0, 0, 0, chunk(5))
    journal.dropped([0])
    journal.close()
    saved = Journal(tmp_path / "j").load()
    assert [g.prompt.id for g in saved.groups] == ["q"]
    assert ("run", "p", 1) in saved.ids, "a dropped id still counts its incarnations"


def test_a_damaged_chunk_costs_the_tokens_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    accept(journal, 0, spec("a", "p"))
    for start in range(4):
        journal.tokens(0, 0, start, chunk(10 + start, start=start))
    journal.close()
    with sqlite3.connect(path) as db:
        (body,) = db.execute("SELECT body FROM chunks WHERE start=2").fetchone()
        db.execute("UPDATE chunks SET body=? WHERE start=2", (body[:-1] + bytes([body[-1] ^ 1]),))
    saved = Journal(path).load()
    kept = saved.groups[0].samples[0].chunk
    assert kept is not None
    assert (kept.output_ids, saved.corrupt) == (ids(10, 11), 1)


def test_an_uncommitted_step_is_lost_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    accept(journal, 0, spec("a", "p"))
    journal.barrier()
    journal.finished(0, sample("p", 0, 5), step=1)
    saved = Journal(tmp_path / "j").load()
    assert saved.groups[0].samples[0].finished is None
    journal.close()


@pytest.mark.parametrize("path", ["missing/folder/j", "."])
def test_an_unusable_path_is_one_sentence(tmp_path: Path, path: str) -> None:
    with pytest.raises(JournalError, match="cannot be used"):
        Journal(tmp_path / path)


def test_another_schema_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "j").close()
    with sqlite3.connect(tmp_path / "j") as db:
        db.execute("UPDATE meta SET value=99 WHERE key='schema'")
    with pytest.raises(JournalError, match="schema 99"):
        Journal(tmp_path / "j")


def test_a_failed_commit_is_told_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "j"
    journal = Journal(path)
    with sqlite3.connect(path) as other:
        other.execute("ALTER TABLE groups RENAME TO hidden")
    accept(journal, 0, spec("a", "p"))
    assert "cannot be written" in journal.barrier()
    with sqlite3.connect(path) as other:
        other.execute("ALTER TABLE hidden RENAME TO groups")
    assert journal.barrier() == ""
    assert [g.prompt.id for g in journal.load().groups] == ["p"]
    journal.close()
