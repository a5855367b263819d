"""Loss of power: with `full`, acknowledged records survive; with `normal`, the journal stays consistent."""

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest

from sglang_april.api.messages import Prompt, RoundSpec, Span
from sglang_april.recovery import schema
from sglang_april.recovery.journal import Journal, JournalError
from sglang_april.recovery.journal_snapshot import Chunk
from tests.unit.crashing_harness import PromptJournal
from tests.unit.lossy_disk import Act, after_power_loss, library, recorded

BATCHES = 60
LOSSES = 150
TOKENS = 300
"""In a batch; the journal is moved into its main file several times on the way."""


def batch(number: int) -> list[schema.Op]:
    """Batch 1 opens a round; each batch has the next tokens of one sample, and its number as the version."""
    start = (number - 1) * TOKENS
    ids = np.arange(start, start + TOKENS, dtype="<i4").tobytes()
    chunk = Chunk(ids, ids, [Span(0, start + TOKENS, 0, "fresh")])
    records = [schema.tokens(0, 0, start, chunk), schema.version(number)]
    if number == 1:
        prompt = Prompt("p", b"\1\0\0\0", 1, 0, 0)
        spec = RoundSpec("round", "run", 1, "group", "keep", None)
        records.insert(0, schema.accepted(spec, 1, [(0, 0, prompt, b"")]))
    return records


def recording_of(folder: Path, lib: ctypes.CDLL, sync: str) -> list[Act]:
    """Everything a journal writes until just before it is closed."""
    with recorded(lib) as recording:
        journal = PromptJournal(folder / "journal", "full" if sync == "full" else "normal")
        journal.start(lambda last, _failed: recording.mark(last))
        journal._db.execute("PRAGMA wal_autocheckpoint=8")
        if sync == "off":
            journal._db.execute("PRAGMA synchronous=OFF")
        for number in range(1, BATCHES + 1):
            journal.put(batch(number))
        acts = list(recording.acts)
        journal.close()
    assert sum(act.kind == "sync" and act.file == "journal" for act in acts) > 3 or sync == "off"
    return acts


def lost_promises(acts: list[Act], folder: Path) -> int:
    """Losses of power after which acknowledged records are missing. What remains must be consistent."""
    lost = 0
    first = next(i for i, act in enumerate(acts) if act.kind == "mark")
    for i in range(LOSSES):
        rng = random.Random(i)
        after = folder / f"loss-{i}"
        after.mkdir()
        promised = after_power_loss(acts[: rng.randint(first, len(acts))], after, rng)
        journal = Journal(after / "journal")
        saved = journal.load()
        journal.close()
        there = saved.version
        assert saved.corrupt == 0
        assert len(saved.groups) == (there > 0)
        if there:
            chunk = saved.groups[0].samples[0].chunk
            assert chunk is not None
            assert np.frombuffer(chunk.output_ids, "<i4").tolist() == list(range(there * TOKENS))
        lost += there < promised
    return lost


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    lib = library()
    if lib is None:
        pytest.skip("this Python keeps the symbols of its SQLite to itself")
    return lib


def test_full_sync_survives_power_loss(tmp_path: Path, lib: ctypes.CDLL) -> None:
    assert lost_promises(recording_of(tmp_path, lib, "full"), tmp_path) == 0


def test_normal_sync_loses_at_most_the_last_steps(tmp_path: Path, lib: ctypes.CDLL) -> None:
    lost_promises(recording_of(tmp_path, lib, "normal"), tmp_path)


def test_unsynced_journal_loses_data_on_the_lossy_disk(tmp_path: Path, lib: ctypes.CDLL) -> None:
    """The control: a journal that never syncs loses acknowledged records or cannot be read."""
    try:
        lost = lost_promises(recording_of(tmp_path, lib, "off"), tmp_path)
    except (AssertionError, JournalError):
        return
    assert lost > 0
