"""The plots of the report, as SVG in a data URL, and README's picture."""

import base64
import io
import json
from collections.abc import Mapping
from statistics import mean, median
from typing import TYPE_CHECKING

from bench.over_sampling import OverSamplingPoint, knee
from bench.record import Row
from bench.rollout.metrics import share
from bench.tables import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(table: dict[str, list[Row]], title: str) -> str:
    """Delivered tokens/s as a share of the full-batch rate, a dot for each repetition; an SVG as a data URL."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.45 * len(table) + 1.2), layout="tight")
    names = list(reversed(table))
    for at, name in enumerate(names):
        shares = [share(row) for row in table[name]]
        axes.barh(at, mean(shares), color="#1f6fb4" if name.startswith("april") else "#9a9a9a", height=0.6)
        axes.plot(shares, [at] * len(shares), "k.", markersize=5)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("delivered tokens/s ÷ the engine's full-batch decode rate")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    return _data_url(figure)


def picture(table: dict[str, list[Row]], titles: Mapping[str, str]) -> tuple[str, str]:
    """Delivered tokens/s of README's variants: medians as bars, with their ratios to the first; repetitions as dots.

    Returns:
        The SVG, and what it shows: the SVG has it as its description.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {titles[name].replace("**", ""): rows for name in titles if (rows := table.get(name))}
    rates = {title: [float(row["delivered_tokens_per_s"]) for row in rows] for title, rows in shown.items()}
    ratios = {
        titles[name].replace("**", ""): headline(table[name], table["synchronous"]) for name in titles if name in table
    }
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(rates) + 0.9), layout="tight")
    for at, (title, values) in enumerate(reversed(rates.items())):
        axes.barh(at, median(values), color="#1f6fb4" if title.startswith("batch") else "#b4b4b4", height=0.62)
        axes.plot(values, [at] * len(values), "k.", markersize=4)
        axes.annotate(f"{ratios[title]:.2f} ×", (max(values), at), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rates)), list(reversed(rates)))
    axes.set_xlabel("delivered tokens per second")
    axes.spines[["top", "right"]].set_visible(False)
    about = json.dumps([rates, ratios], ensure_ascii=True)
    with mpl.rc_context({"svg.hashsalt": "april"}):
        return _svg(figure, Description=about), about


def plot_over_sampling(found: list[OverSamplingPoint]) -> str:
    """Slot-seconds saved over peak bytes; the knee is filled."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="tight")
    best = knee(found)
    for point in found:
        at = point.peak_bytes / 1e6, point.saved
        axes.plot(*at, "o", color="#1f6fb4", markerfacecolor="#1f6fb4" if point is best else "white")
        axes.annotate(f" {point.name}" + (" (knee)" if point is best else ""), at, fontsize=9)
    axes.set_xlabel("peak MB of carried KV, all tiers")
    axes.set_ylabel("idle slot-seconds saved a round")
    axes.spines[["top", "right"]].set_visible(False)
    return _data_url(figure)


def _data_url(figure: "Figure") -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(_svg(figure).encode()).decode()


def _svg(figure: "Figure", **metadata: str) -> str:
    from matplotlib import pyplot as plt

    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None, **metadata})
    plt.close(figure)
    return sink.getvalue()
