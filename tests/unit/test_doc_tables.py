"""Tables of docs come from rows: a changed figure is found, and no table with figures is written by hand."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench import doc_tables, record
from bench.report import DOCS, all_rows, main

PAGES = [record.ROOT / "docs" / name for name in DOCS]
GENERATED = re.compile(r"<!-- (table|bench):.*?<!-- /\1 -->", re.DOTALL)
FIGURE = re.compile(r"(?m)^\|.*\b\d+\.\d+\b.*\|$")


def test_every_table_is_on_a_page_and_has_rows() -> None:
    named = [name for page in PAGES for name in re.findall(r"<!-- table:(\S+) -->", page.read_text())]
    assert sorted(named) == sorted(doc_tables.TABLES)
    rows = all_rows(record.RESULTS)
    for name, table in doc_tables.TABLES.items():
        used, cells = table(rows)
        assert used, name
        assert len(cells) > 1, name
        assert {len(line) for line in cells} == {len(cells[0])}, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_with_figures_is_written_by_hand(page: Path) -> None:
    assert FIGURE.findall(GENERATED.sub("", page.read_text())) == []


def test_a_changed_figure_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "store.md"
    page.write_text((record.ROOT / "docs" / "store.md").read_text())
    command = ["--readme", "--check", "--pages", str(page)]
    assert main(command) == 0
    assert "| 0.0039 |" in page.read_text()
    page.write_text(page.read_text().replace("| 0.0039 |", "| 0.0030 |"))
    assert main(command) == 1
    assert f"{page} differs from the rows" in capsys.readouterr().err


def test_a_table_comes_from_the_newest_run() -> None:
    common = {"machine": {"cpu": "some", "cores": 2}, "versions": {"sglang": "1"}, "commit": "c" * 40, "load": 0.0}
    base = {"bench": "stop_latency", "running": 16, "format": "json", "tokens_after_end": 0, **common}
    rows = [
        {**base, "run_id": "old", "time": "2026-01-01T", "variant": variant, "latency_ms": 1.0}
        for variant in ("april", "outside")
    ]
    rows += [
        {**base, "run_id": "new", "time": "2026-01-02T", "variant": variant, "latency_ms": value}
        for variant, value in (("april", 2.0), ("april", 4.0), ("outside", 8.0))
    ]
    text = doc_tables.fill("a\n<!-- table:stop_latency -->\nold\n<!-- /table -->\nb\n", rows)
    assert "| 16 | 3.0 | 0 | 8.0 | 0 |" in text
    assert "some, 2 cores; SGLang 1; 2026-01-02; commit cccccccc; load up to 0.0." in text
    assert text.startswith("a\n<!-- table:stop_latency -->\n")
    assert text.endswith("<!-- /table -->\nb\n")
    assert "No rows yet." in doc_tables.fill("<!-- table:suspend -->\n<!-- /table -->", rows)


@pytest.mark.parametrize(
    ("bench", "table", "has"),
    [
        ("learning", "learning", {"kind": "run", "variant": "synchronous", "seed": 0}),
        ("host_time", "host_time", {"server": "stock", "running": 256}),
        ("stop_latency", "stop_latency", {"variant": "april"}),
    ],
)
def test_an_interrupted_run_does_not_replace_a_whole_one(bench: str, table: str, has: dict[str, Any]) -> None:
    rows, made = all_rows(record.RESULTS), doc_tables.TABLES[table]
    first = next(row for row in rows if row.get("bench") == bench and has.items() <= row.items())
    assert made([*rows, {**first, "run_id": "interrupted", "time": "2999"}]) == made(rows)


def test_a_load_that_no_run_measured_on_both_servers_has_no_line() -> None:
    row = {"bench": "host_time", "run_id": "a", "time": "1", "running": 256, "host_ms": 3.0}
    assert len(doc_tables.TABLES["host_time"]([{**row, "server": "stock"}])[1]) == 1


def test_rows_of_a_gpu_name_it_and_do_not_fill_a_table_of_a_cpu() -> None:
    rows = [row for row in all_rows(record.RESULTS) if row.get("bench") in ("kernels", "stop_latency")]
    there = [{**row, "run_id": "gpu", "time": "2999", "machine": {**row["machine"], "gpu": "GPU X"}} for row in rows]
    assert doc_tables.kernels([*rows, *there]) == doc_tables.kernels(rows)
    text = doc_tables.fill("<!-- table:stop_latency -->\n<!-- /table -->", [*rows, *there])
    assert "\nGPU X; SGLang" in text
