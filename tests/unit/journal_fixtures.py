"""Journals for tests: records to write, and reading them back."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from sglang_april.api.messages import Delivery, FinishedSample, OpenRound, Prompt, RoundEnded, RoundSpec, Span
from sglang_april.recovery import schema
from sglang_april.recovery.journal import Journal
from sglang_april.recovery.journal_snapshot import Chunk, JournalSnapshot
from tests.unit.crashing_harness import PromptJournal


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def request(round_id: str, *prompts: str, held: bool = False) -> OpenRound:
    requested = [Prompt(p, ids(1, 2), 2, 0, 7) for p in prompts]
    return OpenRound(1, RoundSpec(round_id, "run", 1, "group", "keep", 5, keep_until_ack=held), requested, [b"params"])


def chunk(*values: int, start: int = 0) -> Chunk:
    end = start + len(values)
    tops = [[(-0.5, value)] for value in values]
    return Chunk(ids(*values), np.arange(start, end, dtype="<f4").tobytes(), [Span(0, end, 0, "fresh")], tops)


def sample(prompt: str, index: int, *values: int) -> FinishedSample:
    logprobs = np.zeros(len(values), "<f4").tobytes()
    tops = [[(-0.5, value)] for value in values]
    return FinishedSample("run", prompt, 0, index, ids(*values), logprobs, [], {"type": "stop"}, 9, tops)


def ended(round_id: str, *prompts: str) -> RoundEnded:
    return RoundEnded(round_id, "run", 0, "quota", [Delivery(p, 0, [0, 1], True) for p in prompts], {}, {})


def accept(first_gid: int, opened: OpenRound) -> schema.Op:
    groups = [(first_gid + i, 0, p, b"params") for i, p in enumerate(opened.prompts)]
    return schema.accepted(opened.spec, 1, groups)


def finish_both(gid: int, name: str) -> list[schema.Op]:
    return [schema.finished(gid, 0, 8, sample(name, index, 5, 1)) for index in (0, 1)]


def written(path: Path, *records: schema.Op) -> Path:
    journal = PromptJournal(path)
    journal.start()
    journal.put(list(records))
    journal.close()
    return path


def read(path: Path) -> JournalSnapshot:
    journal = Journal(path)
    saved = journal.load()
    journal.close()
    return saved


def query(path: Path, statement: str, *row: object) -> tuple[Any, ...]:
    """One statement on the file of no server; its first row."""
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(statement, row).fetchone()
