"""The report's tables, from rows: which of them belong together, ratios, columns, and the aims."""

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from bench.record import Row
from bench.rollout.interleaving import INTERLEAVED
from bench.rollout.metrics import limit_of, peaks, share
from bench.rollout.steady_state import carry_is_level

IN_FLIGHT = ("async", "pause-in-place", "pause-retract")
"""Variants whose clients do not see what is prefilled again; older rows have what a rest between rounds had caused."""
ROUNDS = 8
"""Measured rounds of a whole row."""
OUTSIDE = ("outside", "outside-retry3s")
WITH_FACTOR = (*OUTSIDE, "stale-reuse", "pause-retract", "pause-in-place", "async", "april-factor")
"""Variants that start a multiple (the over-sampling factor) of the groups they need."""


def newest(rows: Iterable[Row], preset: str) -> list[Row]:
    """For each table of a preset, the rows of the newest run that measured it; for each cell, its last row.

    A run may take days, and a cell that was cut short may have been measured again.
    """
    mine = [row for row in rows if row.get("bench") == "rollout" and row["preset"] == preset]
    mine = [row for row in mine if not row.get("changed")]
    last: dict[tuple[Any, ...], Row] = {}
    for row in mine:
        if row["time"] >= last.get(_table(row), row)["time"]:
            last[_table(row)] = row
    cells: dict[tuple[Any, ...], Row] = {}
    for row in mine:
        if row["run_id"] == last[_table(row)]["run_id"]:
            cells[*_table(row), row["ablation"], row["variant"], row["repetition"]] = row
    return list(cells.values())


def _table(row: Row) -> tuple[Any, ...]:
    """The key that rows of one table share."""
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


def headline(variant: list[Row], base: list[Row]) -> float | None:
    """The smaller of the token-rate and the group-rate ratio; None without rows.

    Interleaved variants: the median over the repetitions that both have. Others, and paced ones, whose pace no machine
    changes: the ratio of the medians. Each rate is divided by the full-batch rate measured around it, which cancels
    changes of the machine between two rows.
    """
    if not variant or not base:
        return None
    if _is_paced(variant) or not interleaved(variant[0], base[0]):
        return min(median(_rates(variant, rate)) / median(_rates(base, rate)) for rate in RATES)
    other = {(row["time"], row["repetition"]): row for row in base}
    pairs = [(row, other[key]) for row in variant if (key := (row["time"], row["repetition"])) in other]
    ratios = [min(_rates([one], rate)[0] / _rates([two], rate)[0] for rate in RATES) for one, two in pairs]
    return median(ratios) if ratios else None


def _is_paced(rows: list[Row]) -> bool:
    return any(row.get("configuration", {}).get("paced") for row in rows)


def interleaved(one: Row, other: Row) -> bool:
    """Whether two rows of one table were measured by alternating between their variants."""
    return (one["variant"] in INTERLEAVED) == (other["variant"] in INTERLEAVED)


def _rates(rows: list[Row], rate: str) -> list[float]:
    return [row[rate] / limit_of(row) for row in rows]


def better_outside(table: dict[str, list[Row]]) -> list[Row]:
    """The rows of the faster client-side baseline."""
    baselines = [table[name] for name in OUTSIDE if name in table]
    return max(baselines, key=lambda rows: median(map(share, rows)), default=[])


def _number(key: str, spec: str, per: str | None = None) -> Callable[[list[Row]], str]:
    """A column: the median of a figure over the rows, divided by the figure `per` of the same row if given."""

    def shown(rows: list[Row]) -> str:
        values = [row[key] / (row[per] if per else 1) for row in rows if row.get(key) is not None]
        return format(median(values), spec) if values else "–"

    return shown


def _spread(rows: list[Row]) -> str:
    rates = [row["delivered_tokens_per_s"] for row in rows]
    return f"{median(rates):,.0f}" + (f" ({min(rates):,.0f}–{max(rates):,.0f})" if len(rates) > 1 else "")


def _factor(rows: list[Row]) -> str:
    """The over-sampling factors; batch-quota and synchronous rounds have none."""
    factors = {row["plan"]["over_sampling"] for row in rows if row["variant"] in WITH_FACTOR and row.get("plan")}
    return ", ".join(f"{factor:g}" for factor in sorted(factors)) or "–"


def _lost(rows: list[Row]) -> str:
    known = [row["samples_lost"] for row in rows if row["samples_lost"] is not None]
    return str(sum(known)) if known else "–"


def _marks(rows: list[Row]) -> str:
    fewest = min(row.get("rounds", ROUNDS) for row in rows)
    marks = [
        ("paced", _is_paced(rows)),
        ("not steady", any(not row["steady"] for row in rows)),
        ("biased", any(row["biased"] for row in rows)),
        (f"{fewest} rounds", fewest < ROUNDS),
    ]
    return ", ".join(name for name, applies in marks if applies)


def _reprefilled(rows: list[Row]) -> str:
    known = [row for row in rows if row["variant"] not in IN_FLIGHT]
    return _number("reprefilled_tokens", ".2f", per="delivered_tokens")(known)


def _row_level(row: Row) -> bool:
    grown = row["carry_grown"] if row.get("carry_grown") is not None else row["carry_end"] - row["carry_start"]
    return carry_is_level(grown, row["delivered_tokens"])


COLUMNS: dict[str, Callable[[list[Row]], str]] = {
    "rows": lambda rows: str(len(rows)),
    "delivered tokens/s": _spread,
    "groups/s": _number("delivered_groups_per_s", ".2f"),
    "of the limit": lambda rows: f"{median(map(share, rows)):.2f}",
    "factor": _factor,
    "mean length": _number("length_mean", ".1f"),
    "mean batch": _number("mean_running", ".1f"),
    "round p50 s": _number("round_s_p50", ".2f"),
    "after the end, a round": _number("tokens_after_end", ",.0f", per="rounds"),
    "re-prefilled, a token": _reprefilled,
    "off-policy": _number("off_policy_share", ".1%"),
    "hybrid": _number("hybrid_share", ".1%"),
    "lost": _lost,
    "marks": _marks,
}


def _carry(rows: list[Row]) -> str:
    start, end = (median(row[key] for row in rows) for key in ("carry_start", "carry_end"))
    return f"{start:,.0f} → {end:,.0f}"


def _staleness(rows: list[Row]) -> str:
    """Delivered groups by the age of their oldest token, in policy versions."""
    groups: Counter[int] = Counter()
    for row in rows:
        groups.update({int(age): count for age, count in row["staleness"].items()})
    return ", ".join(f"{age}: {count}" for age, count in sorted(groups.items())) or "–"


def _steps(rows: list[Row]) -> str:
    """Decode step times from the probes of the stock server between the rows' rounds, by batch size."""
    batches = sorted({int(batch) for row in rows for batch in row["step_ms_by_batch"]})
    found = {b: [row["step_ms_by_batch"][str(b)] for row in rows if str(b) in row["step_ms_by_batch"]] for b in batches}
    return ", ".join(f"{batch}: {median(took):.1f}" for batch, took in found.items()) or "–"


DETAILS: dict[str, Callable[[list[Row]], str]] = {
    "round p95 s": _number("round_s_p95", ".2f"),
    "push p50 s": _number("push_s_p50", ".3f"),
    "generated tokens/s": _number("generated_tokens_per_s", ",.0f"),
    "computed tokens": _number("computed_tokens", ",.0f"),
    "wasted": _number("wasted_tokens", ",.0f"),
    "carry grown": _number("carry_grown", ",.0f"),
    "carry, tokens": _carry,
    "KS distance": _number("ks_distance", ".3f"),
    "versions old: groups": _staleness,
    "rounds prolonged": _number("rounds_prolonged", ".1f"),
    "peak MB carried": peaks,
    "step ms by batch": _steps,
}


def details_of(table: dict[str, list[Row]]) -> list[list[str]]:
    """Header and one line per variant: the columns that the main table omits."""
    return [
        ["variant", *DETAILS],
        *([name, *(column(rows) for column in DETAILS.values())] for name, rows in table.items()),
    ]


BATCH_QUOTA = ("april-keep", "april-auto", "april-recompute")
FLOORS: tuple[tuple[str, str | None, str, float], ...] = (
    ("lognormal", None, "synchronous", 1.6),
    ("lognormal", None, "outside", 1.25),
    ("lognormal", None, "limit", 0.97),
    ("pareto", None, "synchronous", 1.6),
    ("pareto", None, "outside", 1.25),
    ("extreme:100", "max_staleness unlimited", "synchronous", 1.6),
    ("extreme:100", "max_staleness unlimited", "outside", 1.25),
    ("extreme:100", "max_staleness 5", "synchronous", 1.6),
    ("extreme:100", "max_staleness 5", "outside", 1.25),
    ("extreme:100", "drain", "synchronous", 1.6),
    ("extreme:100", "drain", "outside", 1.25),
    ("constant", None, "synchronous", 0.98),
)
"""Performance targets: (distribution, ablation, baseline, smallest ratio)."""


def aims(rows: list[Row]) -> str:
    """A Markdown list: each target, and what the batch-quota variants reached in a preset's rows."""
    lines = []
    for distribution, ablation, against, floor in FLOORS:
        table = by_variant(rows, distribution, ablation)
        base = better_outside(table) if against == "outside" else table.get(against, [])
        reached: dict[str, float] = {}
        for name in (name for name in BATCH_QUOTA if name in table):
            ratio = median(map(share, table[name])) if against == "limit" else headline(table[name], base)
            reached |= {name: ratio} if ratio is not None else {}
        if reached:
            where = ", ".join(name for name in (distribution, ablation) if name)
            goal = f"{where}: at least {floor:g} " + ("of the limit" if against == "limit" else f"× {against}")
            low, high = min(reached.values()), max(reached.values())
            verdict = "met" if low >= floor else "missed" if high < floor else "partly"
            judged = [row for name in (*reached, against) for row in table.get(name, [])]
            marks = _marks(judged)
            if not all(map(_row_level, judged)):  # tokens from a shrinking carry were computed earlier
                verdict = "not judged"
            details = [f"`{name}` {ratio:.2f}" for name, ratio in reached.items()]
            details.append(f"rows: {len(table[next(iter(reached))])}")
            lines.append(f"- {goal}: **{verdict}** ({', '.join([*details, *([marks] if marks else [])])})")
    return "\n".join(lines) + "\n"


def table_of(table: dict[str, list[Row]]) -> list[list[str]]:
    """Header and one line per variant, with ratios to the synchronous rows and to the better client-side baseline.

    `april-continue` generates while the trainer works, so it is compared with the asynchronous client only.
    """
    lines = [["variant", "× synchronous", "× outside", "× async", *COLUMNS]]
    bases = table.get("synchronous", []), better_outside(table)
    for name, rows in table.items():
        ahead = name == "april-continue"
        ratios = [headline(rows, [] if ahead else base) for base in bases]
        ratios.append(headline(rows, table.get("async", [])) if ahead else None)
        lines.append([name, *map(_ratio, ratios), *(column(rows) for column in COLUMNS.values())])
    return lines


HEADLINE: dict[str, str] = {
    "synchronous": "wait for all",
    "outside": "APRIL as a client: abort, resend",
    "pause-in-place": "SGLang pause, in place",
    "async": "asynchronous client",
    "april-recompute": "**batch quota**, KV recomputed",
    "april-auto": "**batch quota**, KV by cost",
    "april-keep": "**batch quota**, KV kept",
}
"""The variants of README's table and their names there."""


def headline_table(table: dict[str, list[Row]]) -> list[list[str]]:
    """Header and one line per variant of README's table: ratios, speed, and what they cost."""
    head = ["rollouts", "× wait for all", "× client-side APRIL", "tokens/s delivered", "re-prefilled per token"]
    lines = [[*head, "off-policy", "hybrid"]]
    for name, title in HEADLINE.items():
        if rows := table.get(name):
            ratios = (headline(rows, base) for base in (table.get("synchronous", []), better_outside(table)))
            speed = median(row["delivered_tokens_per_s"] for row in rows)
            costs = [COLUMNS[name](rows) for name in ("re-prefilled, a token", "off-policy", "hybrid")]
            lines.append([title, *map(_ratio, ratios), f"{speed:,.0f}", *costs])
    return lines


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"


def ablations_of(rows: list[Row], together: str) -> list[list[str]]:
    """Header and one line per ablation of an interleaved set, with ratios to the first."""
    table: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("together") == together:
            table.setdefault((row["variant"], row["ablation"]), []).append(row)
    base = next(iter(table.values()))
    lines = [["variant", "ablation", "× the first", "KS distance", *COLUMNS]]
    for names, mine in table.items():
        ratio = _ratio(headline(mine, base))
        lines.append([*names, ratio, _number("ks_distance", ".3f")(mine), *(c(mine) for c in COLUMNS.values())])
    return lines
