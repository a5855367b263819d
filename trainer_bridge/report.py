"""`april-train report RUN_DIR`: an HTML page with plots of a run, from `steps.jsonl` and `evaluations.jsonl`."""

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from trainer_bridge.progress import read_rows

Rows = list[dict[str, Any]]
BLUE, GREY, ORANGE, GREEN = "#1f6fb4", "#8c8c8c", "#d9822b", "#3a8f4d"
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#222}"
    "img{max-width:100%}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #ddd}"
)


def write_report(folder: Path, page: Path) -> Path:
    """Write the page. Raises: FileNotFoundError: the run has no completed step."""
    steps, held_out = read_rows(folder / "steps.jsonl"), read_rows(folder / "evaluations.jsonl")
    if not steps:
        raise FileNotFoundError(f"{folder} contains no steps.jsonl with a completed step")
    parts = [f"<h1>{html.escape(folder.name)}</h1>", _summary(steps, held_out)]
    for title, draw in PLOTS.items():
        parts.append(f"<h2>{html.escape(title)}</h2>{_plot(draw, steps, held_out)}")
    parts += ["<h2>Warnings</h2>", _warnings(steps)]
    text = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(folder.name)}</title>'
    page.write_text(f"{text}<style>{STYLE}</style>{''.join(parts)}</html>\n")
    return page


def _summary(steps: Rows, held_out: Rows) -> str:
    last = steps[-1]
    tokens = sum(row["delivered_tokens"] for row in steps)
    seconds = sum(row["generate_s"] for row in steps)
    cells = {
        "steps": len(steps),
        "samples": last["samples_so_far"],
        "seconds": f"{last['seconds_so_far']:.0f}",
        "delivered tokens/s of rollout": f"{tokens / seconds:,.0f}" if seconds else "–",
        "masked samples": sum(row["masked"] for row in steps),
        "groups rejected / unscored / replaced": " / ".join(
            str(sum(row[name] for row in steps)) for name in ("rejected", "unscored", "replaced")
        ),
    }
    if held_out:
        first, end = held_out[0], held_out[-1]
        cells["held-out reward"] = (
            f"{first['reward']:.4f} → {end['reward']:.4f} (± {end['reward_se']:.4f}, {end['prompts']:g} prompts)"
        )
    rows = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in cells.items())
    return f"<table>{rows}</table>"


def _warnings(steps: Rows) -> str:
    warnings = [f"step {row['step']}: {text}" for row in steps for text in [*row.get("warnings", []), *row["problems"]]]
    return (
        "<p>none</p>"
        if not warnings
        else "<ul>" + "".join(f"<li>{html.escape(text)}</li>" for text in warnings) + "</ul>"
    )


def _plot(draw: Callable[[Any, Rows, Rows], None], steps: Rows, held_out: Rows) -> str:
    figure = plt.figure(figsize=(10, 3.2))
    try:
        draw(figure, steps, held_out)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=110)
    finally:
        plt.close(figure)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}">'


def _reward(figure: Any, steps: Rows, held_out: Rows) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, label in ((left, "samples_so_far", "samples"), (right, "seconds_so_far", "seconds")):
        scored = [row for row in steps if row["reward"] is not None]
        axes.plot([r[key] for r in scored], [r["reward"] for r in scored], color=GREY, label="training samples")
        if held_out:
            x, y = [r[key] for r in held_out], [r["reward"] for r in held_out]
            axes.errorbar(x, y, [r["reward_se"] for r in held_out], color=BLUE, marker="o", ms=3, label="held out")
        axes.set_xlabel(label)
    left.set_ylabel("reward")
    left.legend(frameon=False)


def _lengths(figure: Any, steps: Rows, _: Rows) -> None:
    axes = figure.subplots()
    filled = [row for row in steps if row["lengths"]]
    for share, colour in ((50, BLUE), (90, ORANGE), (100, GREY)):
        y = [np.percentile(row["lengths"], share) for row in filled]
        axes.plot([r["step"] for r in filled], y, color=colour, label="longest" if share == 100 else f"{share} %")
    axes.set(xlabel="step", ylabel="response tokens")
    axes.legend(frameon=False)


def _staleness(figure: Any, steps: Rows, _: Rows) -> None:
    axes = figure.subplots()
    x = [row["step"] for row in steps]
    axes.plot(x, [row["off_policy_share"] for row in steps], color=BLUE, label="off-policy share")
    axes.plot(x, [row["hybrid_share"] for row in steps], color=ORANGE, label="hybrid share")
    axes.plot(x, [row["over_three_versions"] for row in steps], color=GREY, label="samples over ≥ 3 versions")
    axes.set(xlabel="step", ylabel="share", ylim=(0, 1))
    axes.legend(frameon=False)


def _by_version(figure: Any, steps: Rows, _: Rows) -> None:
    axes = figure.subplots()
    ages = sorted({int(age) for row in steps for age in row["tokens_by_age"]})
    layers = [[row["tokens_by_age"].get(str(age), 0) for row in steps] for age in ages]
    axes.stackplot([row["step"] for row in steps], layers, labels=[f"{age} versions old" for age in ages])
    axes.set(xlabel="step", ylabel="delivered tokens")
    axes.legend(frameon=False, fontsize=8)


def _time(figure: Any, steps: Rows, _: Rows) -> None:
    axes = figure.subplots()
    names = sorted({name for row in steps for name in row["seconds"]})
    layers = [[row["seconds"].get(name, 0.0) for row in steps] for name in names]
    axes.stackplot([row["step"] for row in steps], layers, labels=names)
    axes.set(xlabel="step", ylabel="seconds")
    axes.legend(frameon=False, fontsize=8)


def _running(figure: Any, steps: Rows, _: Rows) -> None:
    axes = figure.subplots()
    clock = 0.0
    for row in steps:
        points = np.array(row["timeline"], dtype=float).reshape(-1, 2)
        axes.step(clock + points[:, 0], points[:, 1], where="post", color=BLUE, linewidth=0.7)
        clock += row["generate_s"]
        axes.axvline(clock, color="black", linewidth=0.4, alpha=0.4)
    axes.set(xlabel="seconds of rollout; vertical lines: ends of rounds", ylabel="samples running")


def _deciles(figure: Any, steps: Rows, _: Rows) -> None:
    tables = [row["deciles"] for row in steps if len(row["deciles"]) == 10]
    panels = figure.subplots(1, 4)
    shown = (
        ("staleness", "staleness"),
        ("mask_share", "share masked"),
        ("pull", "total |loss weight|"),
        ("reward", "reward"),
    )
    for axes, (name, title) in zip(panels, shown, strict=True):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("decile of length", fontsize=8)
        if tables:
            _bars(axes, tables, name)


def _bars(axes: Axes, tables: list[Rows], name: str) -> None:
    values = np.array([[decile[name] for decile in table] for table in tables])
    axes.bar(range(1, 11), np.nanmean(values, 0), color=BLUE)
    if name == "mask_share":
        clipped = np.array([[decile["clip_share"] for decile in table] for table in tables])
        axes.bar(range(1, 11), clipped.mean(0), bottom=values.mean(0), color=ORANGE)
        axes.set_title("share masked (blue), clipped", fontsize=9)


PLOTS: dict[str, Callable[[Any, Rows, Rows], None]] = {
    "Reward": _reward,
    "Response lengths": _lengths,
    "Staleness": _staleness,
    "Tokens by age": _by_version,
    "Time by phase": _time,
    "Running batch": _running,
    "By response length": _deciles,
}
