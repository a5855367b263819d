"""bench.stop_latency: its rows."""

import argparse
import asyncio
from pathlib import Path

import pytest

from bench import record, stop_latency


def test_every_row_has_the_provenance_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def took(*_: object) -> record.Row:
        return {"latency_ms": 1.0, "engine_ms": None, "tokens_after_end": 0}

    async def big(*_: object) -> list[record.Row]:
        return [{"variant": "april", "format": "json", "reply_tokens": 20, "latency_ms": 1.0}]

    monkeypatch.setattr(stop_latency, "batch_quota", took)
    monkeypatch.setattr(stop_latency, "outside", took)
    monkeypatch.setattr(stop_latency, "big_reply", big)
    common = {"bench": "stop_latency", "run_id": "1", **record.provenance()}
    args = argparse.Namespace(out=tmp_path / "rows.json", repetitions=2, running=[4, 8], reply_tokens=20)
    asyncio.run(stop_latency.measure(args, ("http://stock", "http://april"), common))
    rows = record.read_rows(args.out)
    assert len(rows) == 2 * 2 * 3 + 1
    assert all(row.items() >= common.items() for row in rows)
    assert [row["running"] for row in rows[:6]] == [4, 4, 4, 8, 8, 8]
