"""Files of rows."""

import contextlib
import threading
from pathlib import Path

import pytest

from bench import record


def test_runs_side_by_side_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two writers read the rows before either of them writes, unless one has to wait for the other."""
    path, read_rows = tmp_path / "rows.json", record.read_rows
    both = threading.Barrier(2)

    def read(given: Path) -> list[record.Row]:
        rows = read_rows(given)
        with contextlib.suppress(threading.BrokenBarrierError):  # broken while the other one waits for the lock
            both.wait(0.5)
        return rows

    monkeypatch.setattr(record, "read_rows", read)
    writers = [threading.Thread(target=record.append_rows, args=(path, [{"number": i}])) for i in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(row["number"] for row in read_rows(path)) == [0, 1]
