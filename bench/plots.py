"""The plots of the report, as SVG in a data URL."""

import base64
import io
from statistics import mean
from typing import TYPE_CHECKING

from bench.over_sampling import OverSamplingPoint, knee
from bench.record import Row
from bench.rollout.metrics import share

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
    from matplotlib import pyplot as plt

    sink = io.StringIO()
    figure.savefig(sink, format="svg", metadata={"Date": None})
    plt.close(figure)
    return "data:image/svg+xml;base64," + base64.b64encode(sink.getvalue().encode()).decode()
