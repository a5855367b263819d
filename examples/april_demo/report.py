"""The demo's results: two tables on the terminal, ``summary.json``, and pictures of batches and of learning."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from examples.april_demo.rounds import Result, mean_running, timeline
from examples.april_demo.settings import Settings
from examples.april_demo.training import Trained

COLOURS = {"synchronous": "#8c8c8c", "outside": "#d9822b", "april": "#1f6fb4"}
TITLES = {
    "synchronous": "synchronous: wait for all",
    "outside": "APRIL from a client: count, abort, resend",
    "april": "sglang-april: one request with a batch quota",
}
AGENT_TITLES = {
    "synchronous": "synchronous: wait for all trajectories",
    "april": "sglang-april: a quota of trajectories",
}
NARROW: dict[str, Any] = {"box": SIMPLE_HEAD, "padding": 0}
"""Table options for terminals of 80 columns."""
COLUMNS = {
    "variant": "variant",
    "delivered_tokens_per_s": "delivered\ntokens/s",
    "speed": "speed",
    "tokens_after_end": "tokens\nafter end",
    "reprefilled_tokens": "re-prefilled\ntokens",
    "samples_lost": "samples\nlost",
    "off_policy_share": "off-policy\nshare",
    "mean_running": "mean\nbatch",
}
TRAINING_COLUMNS = {
    "variant": "variant",
    "seconds_per_step": "seconds\nper step",
    "delivered_tokens_per_s": "delivered\ntokens/s",
    "off_policy_share": "off-\npolicy",
    "reward": "held-out\nreward",
    "gain": "gain",
    "reward_se": "s.e.",
    "seconds": "seconds",
}


def title(name: str, settings: Settings) -> str:
    """The display name of a variant."""
    return (AGENT_TITLES if settings.agent else TITLES)[name]


def show_table(rows: list[dict[str, Any]], settings: Settings, console: Console) -> None:
    """Print the results of all variants in one table."""
    title = (
        f"{settings.rounds} rounds of {settings.groups} groups × {settings.samples_per_group} samples, "
        f"{settings.slots} slots, a push before every round; client-side over-sampling {settings.over_provision:g} ×"
    )
    table = Table(title=title, **NARROW)
    for key, heading in COLUMNS.items():
        table.add_column(heading, justify="left" if key == "variant" else "right")
    base = rows[0]["delivered_tokens_per_s"]
    for row in rows:
        shown = {
            **row,
            "delivered_tokens_per_s": f"{row['delivered_tokens_per_s']:,.0f}",
            "speed": f"{row['delivered_tokens_per_s'] / base:.2f}×",
            "off_policy_share": f"{row['off_policy_share']:.1%}",
            "mean_running": f"{row['mean_running']:.1f}",
        }
        table.add_row(*(str(shown[key]) for key in COLUMNS))
    console.print(table)


def show_training(rows: list[dict[str, Any]], settings: Settings, console: Console) -> None:
    """Print the rewards and durations of the training runs; prints nothing if no run finished."""
    sizes, trained = settings.training, [row for row in rows if row["training"]]
    if not trained:
        return
    kind = "trajectories" if settings.agent else "samples"
    table = Table(
        title=f"training: {sizes.steps} steps of {sizes.groups} groups × {sizes.samples_per_group} {kind}, seed "
        f"{settings.seed}; held out: {sizes.held_out} problems",
        **NARROW,
    )
    for key, heading in TRAINING_COLUMNS.items():
        table.add_column(heading, justify="left" if key == "variant" else "right")
    for row in trained:
        inner = row["training"]
        shown = {
            "variant": row["variant"],
            "seconds_per_step": f"{inner['seconds_per_step']:.2f}",
            "delivered_tokens_per_s": f"{inner['delivered_tokens_per_s']:,.0f}",
            "off_policy_share": f"{inner['off_policy_share']:.1%}",
            "reward": f"{row['reward_before']:.3f} → {row['reward_after']:.3f}",
            "gain": f"{inner['gain']:+.3f}",
            "reward_se": f"{row['reward_se']:.3f}",
            "seconds": f"{row['seconds']:.0f}",
        }
        table.add_row(*(shown[key] for key in TRAINING_COLUMNS))
    console.print(table)
    loads = " and ".join(dict.fromkeys(f"{row['training']['other_load']:.0%}" for row in trained))
    console.print(f"other processes used {loads} of the cores during the training", soft_wrap=True)
    for row in trained:
        if not row["training"]["learned"]:
            console.print(f"[yellow]{row['variant']}: the gain is not above two standard errors of the held-out set")


def write_summary(path: Path, rows: list[dict[str, Any]], settings: Settings, seconds: dict[str, float]) -> None:
    """The rows as JSON, and next to them (``run.json``) the settings, the machine, its load and the durations."""
    path.write_text(json.dumps(rows, indent=2) + "\n")
    context = {
        "settings": asdict(settings),
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average_at_end": os.getloadavg(),
        "seconds": seconds,
    }
    path.with_name("run.json").write_text(json.dumps(context, indent=2, default=str) + "\n")


def _panel(axes: Axes, result: Result, row: dict[str, Any], settings: Settings) -> None:
    times, running, ends = timeline(result)
    colour = COLOURS[result.name]
    axes.fill_between(times, running, step="post", color=colour, alpha=0.35, linewidth=0)
    axes.step(times, running, where="post", color=colour, linewidth=0.8)
    axes.axhline(settings.slots, color="black", linewidth=0.6, linestyle=":")
    for end in ends:
        axes.axvline(end, color="black", linewidth=0.7, alpha=0.55)
    axes.set_title(
        f"{TITLES[result.name]} — {row['delivered_tokens_per_s']:,.0f} delivered tokens/s, "
        f"mean batch {mean_running(result):.1f} of {settings.slots}",
        loc="left",
        fontsize=10,
    )
    axes.set_ylabel("samples running")
    axes.set_ylim(0, settings.slots * 1.08)
    axes.spines[["top", "right"]].set_visible(False)


def draw_timeline(path: Path, results: list[Result], rows: list[dict[str, Any]], settings: Settings) -> None:
    """One panel per variant on the same time axis: the earlier a panel's last line, the faster the variant."""
    size = (11, 2.3 * len(results) + 0.7)
    figure, panels = plt.subplots(len(results), 1, sharex=True, sharey=True, figsize=size, squeeze=False)
    for axes, result, row in zip(panels[:, 0], results, rows, strict=True):
        _panel(axes, result, row, settings)
    longest = max(result.seconds for result in results)
    panels[0, 0].set_xlim(0, longest * 1.01)
    panels[-1, 0].set_xlabel(
        f"rollout time in seconds, pushes included: {settings.rounds} rounds of {settings.groups} groups each; "
        "vertical lines: round ends; dotted: slots"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_learning(path: Path, trained: Mapping[str, Trained], titles: Mapping[str, str] = TITLES) -> None:
    """Held-out reward against delivered samples and against the time of the steps; bars: one standard error."""
    figure, panels = plt.subplots(1, 2, sharey=True, figsize=(11, 3.6))
    for axes, key, label in zip(
        panels,
        ("samples_so_far", "seconds_so_far"),
        ("delivered samples", "seconds of training, evaluations left out"),
        strict=True,
    ):
        for name, run in trained.items():
            x, y, error = ([row[field] for row in run.evaluations] for field in (key, "reward", "reward_se"))
            axes.errorbar(x, y, error, color=COLOURS[name], marker="o", markersize=4, capsize=3, label=titles[name])
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out reward")
    panels[0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
