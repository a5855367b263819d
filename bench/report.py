"""Tables and plots from rows: an HTML page, and the tables of README.md and docs.

    python -m bench.report                    # out/bench/report.html from bench/results/*.json
    python -m bench.report --readme           # fills the tables of README and docs, and draws README's picture
    python -m bench.report --readme --check   # fails if a page or the picture differs from the rows

A marker is ``<!-- bench:PRESET DISTRIBUTION -->`` for a table of seven columns, or ``<!-- bench:PRESET DISTRIBUTION
full -->`` for all columns and the aims; it ends with ``<!-- /bench -->``. Each table comes from the newest run that
measured it, and rows of two runs are never compared. Tables of other benchmarks: see `doc_tables.py`.
"""

import argparse
import html
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from bench import doc_tables, record
from bench.over_sampling import points
from bench.over_sampling import table as over_sampling_table
from bench.plots import picture, plot, plot_over_sampling
from bench.record import Row
from bench.tables import HEADLINE, ablations_of, aims, by_variant, details_of, headline_table, newest, table_of
from examples import interrupt

PAGE = record.ROOT / "out" / "bench" / "report.html"
DOCS = ("benchmarks.md", "agent-benchmarks.md", "paced-rounds.md", "simulator.md", "store.md")
PAGES = (record.ROOT / "README.md", *(record.ROOT / "docs" / name for name in DOCS))
PICTURE = record.ROOT / "docs" / "rollout.svg"
MARKER = re.compile(r"(<!-- bench:(\S+) (\S+)( full)? -->\n).*?(<!-- /bench -->)", re.DOTALL)


def markdown(lines: list[list[str]]) -> str:
    """A Markdown table."""
    head, *body = lines
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body)) + "\n"


def provenance(rows: list[Row]) -> str:
    """The machine, commit and run of the rows, in one sentence."""
    first = rows[0]
    machine, count = first["machine"], max(row["repetition"] for row in rows) + 1
    commits = ", ".join(dict.fromkeys(row["commit"][:8] + row["commit"][40:] for row in rows))
    where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    load = max(row.get("load", 0.0) for row in rows)
    if paced := first.get("configuration", {}).get("paced"):
        where = f"**Paced, not measured on a GPU**: {paced}; host: {where}"
    return (
        f"{where}; SGLang {first['versions'].get('sglang')}; commit {commits}; run {first['run_id']}, "
        f"{'up to ' * (count > 1)}{count} repetition{'s' * (count > 1)}, load average at the start {load:.1f}"
    )


def _flat(table: dict[str, list[Row]]) -> list[Row]:
    return [row for rows in table.values() for row in rows]


def readme(text: str, rows: list[Row]) -> str:
    """A page with the tables computed from the rows; markers without rows get no table."""

    def fill(found: re.Match[str]) -> str:
        run = newest(rows, found[2])
        table = by_variant(run, found[3])
        if not table:
            return f"{found[1]}No rows yet.\n{found[5]}"
        if not found[4]:
            return f"{found[1]}{provenance(_flat(table))}.\n\n{markdown(headline_table(table))}{found[5]}"
        body = f"{provenance(_flat(table))}.\n\n{markdown(table_of(table))}\n"
        if run[0].get("configuration", {}).get("paced"):
            return f"{found[1]}{body}{found[5]}"
        return f"{found[1]}{body}The aims, each from the newest run that has its table:\n\n{aims(run)}{found[5]}"

    return MARKER.sub(fill, text)


def _html_table(lines: list[list[str]]) -> str:
    def cells(line: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line) + "</tr>"

    return "<table>" + cells(lines[0], "th") + "".join(cells(line, "td") for line in lines[1:]) + "</table>"


def _rollout_sections(rows: list[Row]) -> Iterable[str]:
    for preset in dict.fromkeys(row["preset"] for row in rows if row.get("bench") == "rollout"):
        run = newest(rows, preset)
        yield f"<h2>Preset {html.escape(preset)}</h2>"
        apart = [row for row in run if not row.get("together")]
        for distribution, ablation in dict.fromkeys((row["distribution"], row["ablation"]) for row in apart):
            table = by_variant(apart, distribution, ablation)
            title = distribution + (f", {ablation}" if ablation else "")
            yield f"{_headed(title, _flat(table))}{_html_table(table_of(table))}{_html_table(details_of(table))}"
            if ablation is None:
                yield f'<img src="{plot(table, f"{preset}: {title}")}">'
        for name in dict.fromkeys(row["together"] for row in run if row.get("together")):
            mine = [row for row in run if row.get("together") == name]
            yield f"{_headed(f'{name}, interleaved', mine)}{_html_table(ablations_of(mine, name))}"
        for distribution in dict.fromkeys(row["distribution"] for row in run):
            if len(found := points(run, distribution)) > 1:
                yield f"<h3>{html.escape(distribution)}: over-sampling against demand-driven admission</h3>"
                yield f'{_html_table(over_sampling_table(found))}<img src="{plot_over_sampling(found)}">'


def _headed(title: str, rows: list[Row]) -> str:
    return f"<h3>{html.escape(title)}</h3><p>{html.escape(provenance(rows))}</p>"


def _plain_sections(rows: list[Row]) -> Iterable[str]:
    """Other benchmarks: for each case, medians over the rows of the newest run that has it."""
    kinds = dict.fromkeys(str(row.get("bench")) for row in rows)
    for kind in (kind for kind in kinds if kind != "rollout"):
        cases: dict[tuple[Any, ...], list[Row]] = {}
        for row in (row for row in rows if str(row.get("bench")) == kind):
            cases.setdefault(_case(row), []).append(row)
        lines = []
        for mine in cases.values():
            last = max(mine, key=lambda row: row.get("time", ""))
            run = [row for row in mine if row.get("run_id") == last.get("run_id")]
            lines.append({"rows": len(run)} | {key: _middle([row.get(key) for row in run]) for key in last})
        lines.sort(key=lambda line: str(line.get("time", "")))
        columns = dict.fromkeys(key for line in lines for key in line if key not in ("bench", "repetition"))
        plain = [key for key in columns if not any(isinstance(line.get(key), dict | list) for line in lines)]
        yield f"<h2>{html.escape(kind)}</h2>"
        yield _html_table([plain, *([_cell(line.get(key)) for key in plain] for line in lines)])


ABOUT = ("bench", "run_id", "of_run", "time", "commit", "skipped")
SIZES = ("running", "reply_tokens", "tokens", "seed", "programs")


def _case(row: Row) -> tuple[Any, ...]:
    """The key of a case: the names in a row, its sizes, the processor or the GPU."""
    names = [(key, what) for key, what in row.items() if isinstance(what, str) and key not in ABOUT]
    machine = row.get("machine", {})
    return *names, *((key, row.get(key)) for key in SIZES), machine.get("gpu") or machine.get("cpu")


def _middle(values: list[Any]) -> Any:
    """The median of numbers, else the last value."""
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return median(values)
    return values[-1]


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


STYLE = "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 8px;text-align:right}"
NOTE = (
    "Every figure is computed from rows under bench/results. The headline ratio is the smaller of the token and the "
    "group ratio, the median over repetitions in turns (of what was measured apart, the ratio of the medians), each "
    "rate in units of the full-batch rate just before and after it (raw: as they are). The limit is that rate, a "
    "decode without any prefill. Rows marked biased deliver other lengths than their source has."
)


def page(rows: list[Row]) -> str:
    """The HTML report."""
    body = "".join([*_rollout_sections(rows), *_plain_sections(rows)]) or "<p>No rows.</p>"
    return f"<!doctype html><meta charset=utf-8><title>Benchmarks</title><style>{STYLE}</style><p>{NOTE}</p>{body}"


def all_rows(folder: Path) -> list[Row]:
    """The rows of every file."""
    return [row for path in sorted(folder.glob("*.json")) for row in record.read_rows(path)]


def main(given: list[str] | None = None) -> int:
    """Returns 0, or 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=record.RESULTS, help="folder of rows (%(default)s)")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page (%(default)s)")
    parser.add_argument(
        "--readme", action="store_true", help="fill the tables of README.md and docs, draw README's picture"
    )
    parser.add_argument("--pages", nargs="+", type=Path, default=PAGES, help="with --readme: fill these pages instead")
    parser.add_argument("--picture", type=Path, help=f"with --readme: README's picture ({PICTURE}; none with --pages)")
    parser.add_argument("--check", action="store_true", help="with --readme: change nothing, fail on a difference")
    args = parser.parse_args(given)
    rows = all_rows(args.results)
    if not args.readme:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(rows))
        print(args.out)
        return 0
    picture_path = args.picture or (PICTURE if args.pages is PAGES else None)
    drawn = _draw(picture_path, rows, check=args.check) if picture_path else 0
    return max([drawn, *(_fill(path, rows, check=args.check) for path in args.pages)])


def _fill(path: Path, rows: list[Row], *, check: bool) -> int:
    old = path.read_text()
    new = doc_tables.fill(readme(old, rows), rows)
    if check:
        if old != new:
            print(f"{path} differs from the rows: python -m bench.report --readme", file=sys.stderr)
        return int(old != new)
    path.write_text(new)
    return 0


def _draw(path: Path, rows: list[Row], *, check: bool) -> int:
    """README's picture, of the rows of its table. Its bytes depend on matplotlib, so what it shows is compared."""
    table = by_variant(newest(rows, "cpu"), "lognormal")
    if not table:
        return 0
    svg, about = picture(table, HEADLINE)
    if not check:
        path.write_text(svg)
        return 0
    differs = html.escape(about, quote=False) not in (path.read_text() if path.exists() else "")
    if differs:
        print(f"{path} differs from the rows: python -m bench.report --readme", file=sys.stderr)
    return int(differs)


if __name__ == "__main__":
    interrupt.run(main, "nothing was written")
