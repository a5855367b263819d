"""Attached requests in the journal: found again by run and `rid`, and not kept for ever."""

from pathlib import Path

import numpy as np
import pytest

from sglang_april.api.messages import FinishedSample, Prompt, Span
from sglang_april.api.run_keys import run_key
from sglang_april.recovery import schema, snapshot_reader
from sglang_april.recovery.journal import Journal
from sglang_april.recovery.journal_snapshot import Chunk, JournalSnapshot
from sglang_april.scheduler import attached_journal
from sglang_april.scheduler.attached_journal import KeptRequests, saved_requests, tokens_of
from sglang_april.scheduler.restore import restored_event

SPANS = [Span(0, 3, 1, "fresh")]
AGENTS = run_key("requests", "agents")


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def logprobs(count: int) -> bytes:
    return np.full(count, -1, "<f4").tobytes()


def request(gid: int, rid: str) -> schema.NewGroup:
    return gid, 0, Prompt(f"{gid}:{rid}", ids(7, 8), n=1, params=0, seed=0), b"params"


def saved_after(path: Path, *records: schema.Op) -> JournalSnapshot:
    """What a restarted server reads."""
    journal = Journal(path)
    journal.load()
    journal.start()
    journal.put(records)
    journal.close()
    journal = Journal(path)
    try:
        return journal.load()
    finally:
        journal.close()


def test_tokens_and_answers_are_found_by_run_and_rid(tmp_path: Path) -> None:
    chunk = Chunk(ids(1, 2, 3), logprobs(3), SPANS)
    tail = FinishedSample(AGENTS, "4:b", 0, 0, ids(9), logprobs(1), SPANS, {"type": "stop", "matched": 9}, 0)
    saved = saved_after(
        tmp_path / "journal",
        schema.attached(AGENTS, request(5, "a")),
        schema.tokens(5, 0, 0, chunk),
        schema.attached(AGENTS, request(4, "b")),
        schema.tokens(4, 0, 0, chunk),
        schema.finished(4, 3, 17, tail),
        schema.attached(AGENTS, request(6, "without tokens")),
        schema.attached(AGENTS, request(7, "dropped")),
        schema.dropped([7]),
    )
    assert (saved.next_gid, saved.groups, saved.corrupt) == (8, [], 0)
    found = saved_requests(saved)
    assert found.keys() == {(AGENTS, "a"), (AGENTS, "b")}
    assert tokens_of(found[AGENTS, "a"]) == chunk
    answered = found[AGENTS, "b"]
    assert tokens_of(answered).output_ids == ids(1, 2, 3, 9)
    assert answered.samples[0].finished is not None
    assert answered.samples[0].finished.finish_reason == {"type": "stop", "matched": 9}
    event = restored_event(saved, unnamed=False)
    assert (event.groups, event.finished) == ([], []), (
        "the HTTP process does not have them until they are requested again"
    )


def test_the_latest_request_of_a_rid_counts(tmp_path: Path) -> None:
    saved = saved_after(
        tmp_path / "journal",
        schema.attached(AGENTS, request(1, "a")),
        schema.tokens(1, 0, 0, Chunk(ids(1), logprobs(1), SPANS)),
        schema.attached(AGENTS, request(2, "a")),
        schema.tokens(2, 0, 0, Chunk(ids(2), logprobs(1), SPANS)),
    )
    assert saved_requests(saved)[AGENTS, "a"].gid == 2


def test_an_older_request_does_not_lower_the_next_number(tmp_path: Path) -> None:
    saved = saved_after(
        tmp_path / "journal",
        schema.attached(AGENTS, request(9, "a")),
        schema.attached(AGENTS, request(3, "b")),
    )
    assert saved.next_gid == 10


def test_answers_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_journal, "MAX_KEPT", 3)
    monkeypatch.setattr(attached_journal, "MAX_TOKENS", 100)
    kept = KeptRequests()
    assert [kept.add(gid, 10) for gid in range(4)] == [[], [], [], [0]]
    kept.remove(2)
    assert kept.add(4, 10) == []
    assert kept.add(5, 90) == [1, 3]
    assert kept.add(6, 200) == [4, 5, 6]


def test_a_request_that_is_not_sent_again_yet_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the oldest; sent again later, it would have no record, and a second kill would lose its tokens."""
    monkeypatch.setattr(attached_journal, "MAX_KEPT", 1)
    saved = saved_after(
        tmp_path / "journal",
        schema.attached(AGENTS, request(1, "a")),
        schema.tokens(1, 0, 0, Chunk(ids(1), logprobs(1), SPANS)),
    )
    kept = KeptRequests(saved.attached)
    assert [kept.add(gid, 10) for gid in (2, 3)] == [[], [2]]


def test_a_restart_keeps_every_token_of_requests_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of tokens is that of answers: unfinished requests have callers, and the oldest are the longest."""
    monkeypatch.setattr(attached_journal, "MAX_TOKENS", 10)
    monkeypatch.setattr(snapshot_reader, "MAX_TOKENS", 10, raising=False)
    chunk = Chunk(ids(*range(8)), logprobs(8), SPANS)
    records = [[schema.attached(AGENTS, request(i, str(i))), schema.tokens(i, 0, 0, chunk)] for i in range(3)]
    saved = saved_after(tmp_path / "journal", *(record for pair in records for record in pair))
    assert [group.gid for group in saved.attached] == [0, 1, 2]
    assert restored_event(saved, unnamed=False).warnings == []


def test_requests_that_are_never_sent_again_do_not_accumulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers whose `rid`s SGLang draws send theirs again under other ones."""
    monkeypatch.setattr(snapshot_reader, "MAX_KEPT", 2)
    path, chunk = tmp_path / "journal", Chunk(ids(1), logprobs(1), SPANS)
    records = [[schema.attached(AGENTS, request(i, str(i))), schema.tokens(i, 0, 0, chunk)] for i in range(3)]
    saved = saved_after(path, *(record for pair in records for record in pair))
    assert [group.gid for group in saved.attached] == [1, 2]
    assert restored_event(saved, unnamed=False).warnings == [
        "unfinished attached requests forgotten, the oldest beyond 2: 1"
    ]
    monkeypatch.undo()
    assert [group.gid for group in saved_after(path).attached] == [1, 2]
