"""The page of `bench.learning`: a table and plots of its newest run, from its rows."""

import base64
import html
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt

from bench.learning_stats import LAST, MARGIN, cost_to, in_regime, ks_distance, paired, reward_at
from bench.record import Row

BASE = "synchronous"
COLOURS = {
    BASE: "#8c8c8c",
    "recompute": "#3a8f4d",
    "keep": "#1f6fb4",
    "keep-uncorrected": "#d9822b",
    "cohort": "#8250a0",
}
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}"
    "img{max-width:100%}table{border-collapse:collapse}"
    "td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
)
TARGET_SHARE = 0.9
"""Position of the target between the reward before training and the final reward of the synchronous runs."""


def by_variant(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Finished runs by variant and seed."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["kind"] == "run":
            found.setdefault(row["variant"], {})[row["seed"]] = row
    return found


def target(base: dict[int, Row]) -> float | None:
    """The held-out reward up to which the costs of all variants are measured; None without a synchronous run."""
    if not base:
        return None
    before, end = (mean(row[name] for row in base.values()) for name in ("reward_before", "reward_final"))
    return before + TARGET_SHARE * (end - before)


def table(found: dict[str, dict[int, Row]]) -> list[list[str]]:
    """Header and a line per variant."""
    base = found.get(BASE, {})
    goal = target(base)
    head = ["variant", "seeds", "held-out before", "held-out", f"less {BASE}", "95 % interval", "verdict"]
    head += ["samples to target", "seconds to target", "seconds", "off-policy", "≥ 3 versions", "hybrid", "KV drift"]
    head += ["KS of lengths"]
    return [head, *(_line(name, runs, base, goal) for name, runs in found.items())]


def _line(name: str, runs: dict[int, Row], base: dict[int, Row], goal: float | None) -> list[str]:
    rows = list(runs.values())
    ended = ends(runs, base)
    line = [name, str(len(rows)), _mean(rows, "reward_before", ".4f"), format(mean(ended.values()), ".4f")]
    compared = None
    if name != BASE:
        compared = paired(ended, {seed: row["reward_final"] for seed, row in base.items()})
    if compared is None:
        line += ["–", "–", "–"]
    else:
        interval = "–" if compared.low is None else f"{compared.low:+.4f} … {compared.high:+.4f}"
        line += [f"{compared.mean:+.4f}", interval, compared.verdict]
    line += [_costs(rows, goal, key) for key in ("samples_so_far", "seconds_so_far")]
    line += [_mean(rows, "seconds", ",.0f")]
    line += [_mean(rows, key, ".1%") for key in ("off_policy_share", "over_three_versions", "hybrid_share")]
    distances = [ks_distance(_counts(row), _counts(base[seed])) for seed, row in runs.items() if seed in base]
    return [*line, _mean(rows, "kv_drift", ".4f"), f"{mean(distances):.3f}" if distances else "–"]


def ends(runs: dict[int, Row], base: dict[int, Row]) -> dict[int, float]:
    """Held-out reward by seed, at the numbers of samples of the synchronous run's last evaluations."""
    points = {seed: base.get(seed, row)["evaluations"][1:][-LAST:] for seed, row in runs.items()}
    return {
        seed: reward_at([point["samples_so_far"] for point in points[seed]], row["evaluations"])
        for seed, row in runs.items()
    }


def _mean(rows: list[Row], key: str, spec: str) -> str:
    values = [row[key] for row in rows if row[key] is not None]
    return format(mean(values), spec) if values else "–"


def _costs(rows: list[Row], goal: float | None, key: str) -> str:
    costs = [None if goal is None else cost_to(goal, row["evaluations"], key) for row in rows]
    reached = [cost for cost in costs if cost is not None]
    if not reached:
        return "–"
    return f"{mean(reached):,.0f}" + (f" ({len(reached)} of {len(rows)})" if len(reached) < len(rows) else "")


def _counts(row: Row) -> dict[int, int]:
    """Counts by length (JSON keys are strings)."""
    return {int(length): count for length, count in row["lengths"].items()}


def _rewards(axes: Any, found: dict[str, dict[int, Row]], key: str) -> None:
    for name, runs in found.items():
        for row in runs.values():
            x, y = ([point[field] for point in row["evaluations"]] for field in (key, "reward"))
            axes.plot(x, y, color=COLOURS[name], linewidth=0.6, alpha=0.5)
        curves = [[point["reward"] for point in row["evaluations"]] for row in runs.values()]
        times = [[point[key] for point in row["evaluations"]] for row in runs.values()]
        axes.plot(np.mean(times, 0), np.mean(curves, 0), color=COLOURS[name], linewidth=2, label=name)
    axes.set_ylabel("held-out reward")
    axes.legend(frameon=False, fontsize=8)


def _against_samples(axes: Any, found: dict[str, dict[int, Row]]) -> None:
    _rewards(axes, found, "samples_so_far")
    axes.set_xlabel("delivered samples (thin: seeds; thick: their mean)")


def _against_seconds(axes: Any, found: dict[str, dict[int, Row]]) -> None:
    _rewards(axes, found, "seconds_so_far")
    axes.set_xlabel("seconds of training, evaluations left out")


def _lengths(axes: Any, found: dict[str, dict[int, Row]]) -> None:
    for name, runs in found.items():
        lengths = np.sort(np.concatenate([np.repeat(*_sorted(_counts(row))) for row in runs.values()]))
        axes.step(lengths, np.arange(1, len(lengths) + 1) / len(lengths), color=COLOURS[name], label=name)
    axes.set(xlabel="tokens of a trained sample", ylabel="share that is no longer", xscale="log")
    axes.legend(frameon=False, fontsize=8)


def _sorted(counts: dict[int, int]) -> tuple[list[int], list[int]]:
    return list(counts), list(counts.values())


PLOTS: dict[str, Callable[[Any, dict[str, dict[int, Row]]], None]] = {
    "Held-out reward against samples": _against_samples,
    "Held-out reward against time": _against_seconds,
    "Lengths of the trained samples": _lengths,
}


def _picture(draw: Callable[[Any, dict[str, dict[int, Row]]], None], found: dict[str, dict[int, Row]]) -> str:
    figure, axes = plt.subplots(figsize=(10, 3.6))
    draw(axes, found)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=110)
    plt.close(figure)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(sink.getvalue()).decode()}">'


def _summary(rows: list[Row], found: dict[str, dict[int, Row]]) -> str:
    first = rows[0]
    regime = [row for row in rows if row["kind"] == "regime"]
    lines = [
        f"Run {first['run_id']}, {first['machine']['cpu']}, {first['machine']['cores']} cores, commit "
        f"{first['commit'][:8]}, {first['time']}; sizes: {first['sizes']}.",
        f"Held-out reward is the mean of a run's last {LAST} evaluations; where a variant's steps deliver more "
        "samples than the synchronous ones, it is taken at the same numbers of samples. Differences are paired over "
        f"seeds, with the 95 % interval of Student's t; “not inferior” means that its lower end is above −{MARGIN}.",
    ]
    if regime:
        seen = regime[-1]["off_policy_share"], regime[-1]["over_three_versions"]
        inside = "inside" if in_regime(*seen) else "OUTSIDE"
        lines.append(
            f"Regime of the check: {seen[0]:.0%} of the tokens off-policy, {seen[1]:.0%} of the samples over ≥ 3 "
            f"versions: {inside} of where the comparison is meaningful."
        )
    goal = target(found.get(BASE, {}))
    if goal is not None:
        lines.append(f"The target of “to target” is a held-out reward of {goal:.4f}, {TARGET_SHARE:.0%} of the way up.")
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def page(rows: list[Row]) -> str:
    """The HTML page of the newest run."""
    if not rows:
        return "<!doctype html><meta charset=utf-8><p>No rows.</p>"
    run = [row for row in rows if row["run_id"] == max(rows, key=lambda row: row["time"])["run_id"]]
    found = by_variant(run)
    head, *body = table(found)
    cells = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in body]
    parts = [_summary(run, found), f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"]
    if found:
        parts += [f"<h2>{html.escape(title)}</h2>{_picture(draw, found)}" for title, draw in PLOTS.items()]
    title = "Learning from partial rollouts"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1>{''.join(parts)}</html>\n"
    )


def write_page(rows: list[Row], path: Path) -> Path:
    """Write the page; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(rows))
    return path
