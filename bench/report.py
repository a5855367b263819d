"""Tables and plots from rows only: one HTML page, and the tables that README copies.

    python -m bench.report                    # out/bench/report.html from bench/results/*.json
    python -m bench.report --readme           # writes README's tables between their markers
    python -m bench.report --readme --check   # fails when README says anything else than the rows

A marker in README is ``<!-- bench:PRESET DISTRIBUTION -->``, its end ``<!-- /bench -->``; between them stands the main
table of that distribution. Each table is that of the newest run which has it, and rows of two runs are never compared.
"""

import argparse
import html
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench import record
from bench.over_sampling import points
from bench.over_sampling import table as over_sampling_table
from bench.plots import plot, plot_over_sampling
from bench.record import Row
from bench.rollout.figures import limit_of, share
from bench.rollout.turns import IN_TURNS

MARKER = re.compile(r"(<!-- bench:(\S+) (\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
ROUNDS = 8
"""Measured rounds of a whole row."""
OUTSIDE = ("outside", "outside-retry3s")


def newest(rows: Iterable[Row], preset: str) -> list[Row]:
    """Of each table of a preset the rows of the newest run that has it (a run may have gone on for days)."""
    mine = [row for row in rows if row.get("bench") == "rollout" and row["preset"] == preset]
    last: dict[tuple[Any, ...], Row] = {}
    for row in mine:
        if row["time"] >= last.get(_table(row), row)["time"]:
            last[_table(row)] = row
    return [row for row in mine if row["run_id"] == last[_table(row)]["run_id"]]


def _table(row: Row) -> tuple[Any, ...]:
    """What the rows of one table have in common."""
    together = row.get("together")
    return row["distribution"], together or row["ablation"], bool(together)


def by_variant(rows: Iterable[Row], distribution: str, ablation: str | None = None) -> dict[str, list[Row]]:
    """Rows of one table, by variant, in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if (row["distribution"], row["ablation"]) == (distribution, ablation):
            found.setdefault(row["variant"], []).append(row)
    return found


RATES = ("delivered_tokens_per_s", "delivered_groups_per_s")


def headline(variant: list[Row], base: list[Row], *, raw: bool = False) -> float | None:
    """The smaller of the token and the group ratio: the median over the repetitions that both have, where they were
    measured in turns, else the ratio of the medians of all there are.

    Each rate counts in units of the full-batch rate around it, so that a machine that becomes faster or slower between
    two rows is no difference between them; `raw` leaves that out, and says nothing of what was measured apart."""
    if not variant or not base:
        return None
    if not in_turns(variant[0], base[0]):
        if raw:
            return None
        medians = [(median(_rates(variant, rate, raw)), median(_rates(base, rate, raw))) for rate in RATES]
        return min(one / two for one, two in medians)
    other = {row["repetition"]: row for row in base}
    pairs = [([row], [other[row["repetition"]]]) for row in variant if row["repetition"] in other]
    ratios = [min(_rates(one, rate, raw)[0] / _rates(two, rate, raw)[0] for rate in RATES) for one, two in pairs]
    return median(ratios) if ratios else None


def in_turns(one: Row, other: Row) -> bool:
    """Whether rows of one table were measured in turns with one another."""
    return (one["variant"] in IN_TURNS) == (other["variant"] in IN_TURNS)


def _rates(rows: list[Row], rate: str, raw: bool) -> list[float]:
    return [row[rate] if raw else row[rate] / limit_of(row) for row in rows]


def better_outside(table: dict[str, list[Row]]) -> list[Row]:
    """The faster of the ways from outside."""
    there = [table[name] for name in OUTSIDE if name in table]
    return max(there, key=lambda rows: mean(map(share, rows)), default=[])


def _number(key: str, form: str) -> Callable[[list[Row]], str]:
    def shown(rows: list[Row]) -> str:
        values = [row[key] for row in rows if row.get(key) is not None]
        return format(mean(values), form) if values else "–"

    return shown


def _spread(rows: list[Row]) -> str:
    rates = [row["delivered_tokens_per_s"] for row in rows]
    return f"{mean(rates):,.0f}" + (f" ({min(rates):,.0f}–{max(rates):,.0f})" if len(rates) > 1 else "")


def _lost(rows: list[Row]) -> str:
    known = [row["samples_lost"] for row in rows if row["samples_lost"] is not None]
    return str(sum(known)) if known else "–"


def _marks(rows: list[Row]) -> str:
    marks = [
        ("not steady", any(not row["steady"] for row in rows)),
        ("biased", any(row["biased"] for row in rows)),
        ("cut short", any(row.get("rounds", ROUNDS) < ROUNDS for row in rows)),
    ]
    return ", ".join(name for name, there in marks if there)


COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "rows": lambda rows: str(len(rows)),
    "delivered tokens/s": _spread,
    "groups/s": _number("delivered_groups_per_s", ".2f"),
    "of the limit": lambda rows: f"{mean(map(share, rows)):.2f}",
    "mean length": _number("length_mean", ".1f"),
    "mean batch": _number("mean_running", ".1f"),
    "round p50 s": _number("round_s_p50", ".2f"),
    "after the end": _number("tokens_after_end", ",.0f"),
    "re-prefilled": _number("reprefilled_tokens", ",.0f"),
    "off-policy": _number("off_policy_share", ".1%"),
    "hybrid": _number("hybrid_share", ".1%"),
    "lost": _lost,
    "marks": _marks,
}


def table_of(table: dict[str, list[Row]]) -> list[list[str]]:
    """Header and one line per variant; ratios are against the synchronous rows and the better ones from outside.

    What generates while the trainer works is compared with the asynchronous client only."""
    lines = [["variant", "× synchronous", "× outside", "× async", "raw: × synchronous", "× outside", *COLUMNS]]
    bases = table.get("synchronous", []), better_outside(table)
    for name, rows in table.items():
        ahead = name == "april-continue"
        against = [headline(rows, [] if ahead else base, raw=raw) for raw in (False, True) for base in bases]
        ratios = [*against[:2], headline(rows, table.get("async", [])) if ahead else None, *against[2:]]
        shown = [f"{ratio:.2f}" if ratio is not None else "–" for ratio in ratios]
        lines.append([name, *shown, *(column(rows) for column in COLUMNS.values())])
    return lines


def ablations_of(rows: list[Row], together: str) -> list[list[str]]:
    """Header and one line for each of the ablations that were measured in turns, against the first of them."""
    table: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("together") == together:
            table.setdefault((row["variant"], row["ablation"]), []).append(row)
    base = next(iter(table.values()))
    lines = [["variant", "ablation", "× the first", "KS distance", *COLUMNS]]
    for names, mine in table.items():
        ratio = headline(mine, base) or 0.0
        lines.append(
            [*names, f"{ratio:.2f}", _number("ks_distance", ".3f")(mine), *(c(mine) for c in COLUMNS.values())]
        )
    return lines


def markdown(lines: list[list[str]]) -> str:
    """A table for README."""
    head, *body = lines
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body)) + "\n"


def said(rows: list[Row]) -> str:
    """One sentence on where and when the rows come from."""
    first = rows[0]
    machine, count = first["machine"], max(row["repetition"] for row in rows) + 1
    commits = ", ".join(dict.fromkeys(row["commit"][:8] + row["commit"][40:] for row in rows))
    where = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    load = max(row.get("load", 0.0) for row in rows)
    return (
        f"{where}; SGLang {first['versions'].get('sglang')}; commit {commits}; run {first['run_id']}, "
        f"{'up to ' * (count > 1)}{count} repetition{'s' * (count > 1)}, load average at the start {load:.1f}"
    )


def _flat(table: dict[str, list[Row]]) -> list[Row]:
    return [row for rows in table.values() for row in rows]


def readme(text: str, rows: list[Row]) -> str:
    """README with the tables that the rows give; markers without rows lose their table."""

    def fill(found: re.Match[str]) -> str:
        run = newest(rows, found[2])
        table = by_variant(run, found[3])
        body = f"{said(_flat(table))}.\n\n{markdown(table_of(table))}" if table else "No rows yet.\n"
        return f"{found[1]}{body}{found[4]}"

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
            yield f"{_headed(title, _flat(table))}{_html_table(table_of(table))}"
            if ablation is None:
                yield f'<img src="{plot(table, f"{preset}: {title}")}">'
        for name in dict.fromkeys(row["together"] for row in run if row.get("together")):
            mine = [row for row in run if row.get("together") == name]
            yield f"{_headed(f'{name}, in turns', mine)}{_html_table(ablations_of(mine, name))}"
        for distribution in dict.fromkeys(row["distribution"] for row in run):
            if len(found := points(run, distribution)) > 1:
                yield f"<h3>{html.escape(distribution)}: over-sampling against demand-driven admission</h3>"
                yield f'{_html_table(over_sampling_table(found))}<img src="{plot_over_sampling(found)}">'


def _headed(title: str, rows: list[Row]) -> str:
    return f"<h3>{html.escape(title)}</h3><p>{html.escape(said(rows))}</p>"


def _plain_sections(rows: list[Row]) -> Iterable[str]:
    """Other benchmarks' rows as they are: the fields that differ between the rows of the newest run."""
    kinds = dict.fromkeys(str(row.get("bench")) for row in rows)
    for kind in (kind for kind in kinds if kind != "rollout"):
        mine = [row for row in rows if str(row.get("bench")) == kind]
        last = max(mine, key=lambda row: row.get("time", ""))
        run = [row for row in mine if row.get("run_id") == last.get("run_id")]
        plain = [key for key in run[-1] if not isinstance(run[-1][key], dict | list) and key not in ("bench", "commit")]
        yield f"<h2>{html.escape(kind)}</h2>"
        yield _html_table([plain, *([_cell(row.get(key)) for key in plain] for row in run)])


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
    """The whole report."""
    body = "".join([*_rollout_sections(rows), *_plain_sections(rows)]) or "<p>No rows.</p>"
    return f"<!doctype html><meta charset=utf-8><title>Benchmarks</title><style>{STYLE}</style><p>{NOTE}</p>{body}"


def all_rows(folder: Path) -> list[Row]:
    """The rows of every file."""
    return [row for path in sorted(folder.glob("*.json")) for row in record.read_rows(path)]


def main(given: list[str] | None = None) -> int:
    """0; 1 if `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    parser.add_argument("--out", type=Path, default=record.ROOT / "out" / "bench" / "report.html")
    parser.add_argument("--readme", nargs="?", type=Path, const=record.ROOT / "README.md", help="fill README's tables")
    parser.add_argument("--check", action="store_true", help="with --readme: change nothing, fail on a difference")
    args = parser.parse_args(given)
    rows = all_rows(args.results)
    if args.readme is None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page(rows))
        print(args.out)
        return 0
    old = args.readme.read_text()
    new = readme(old, rows)
    if args.check:
        if old != new:
            print(f"{args.readme} differs from the rows: python -m bench.report --readme", file=sys.stderr)
        return int(old != new)
    args.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
