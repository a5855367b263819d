"""The cost of over-sampling: bytes of carried KV against idle slot-seconds saved, from rows, with the knee.

Starting more than the quota keeps slots busy that would stay empty, and costs partials that are carried. The points are
the batch quota with fixed factors, and with demand-driven admission (prompts start as slots become free).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from bench.record import Row
from bench.rollout.metrics import limit_of, peaks, share

ABLATION = "over-sampling "
FIXED, DRIVEN = "april-factor", "april-keep"
DEMAND = "demand-driven"


@dataclass(frozen=True)
class OverSamplingPoint:
    """One admission setting. `idle`: slot-seconds per round without a running sample, normalised to the mean speed of
    all points; `saved`: the difference to the smallest factor."""

    name: str
    peak_bytes: int
    carry: float
    idle: float
    saved: float
    share: float
    by_tier: str
    """Peak megabytes of each tier."""


def points(rows: list[Row], distribution: str) -> list[OverSamplingPoint]:
    """Points by rising factor, then demand-driven admission; empty without the smallest factor."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["distribution"] == distribution and (name := _name(row)):
            found.setdefault(name, []).append(row)
    factors = sorted((name for name in found if name != DEMAND), key=lambda name: float(name.rstrip("×")))
    if not factors:
        return []
    speed = mean(limit_of(row) for rows in found.values() for row in rows)
    least = _idle(found[factors[0]], speed)
    return [
        OverSamplingPoint(
            name,
            max(sum(row["peak_bytes"].values()) for row in found[name]),
            mean(row["carry_end"] for row in found[name]),
            idle := _idle(found[name], speed),
            least - idle,
            mean(map(share, found[name])),
            peaks(found[name]),
        )
        for name in [*factors, *([DEMAND] if DEMAND in found else [])]
    ]


def knee(found: list[OverSamplingPoint]) -> OverSamplingPoint | None:
    """The knee of the curve: the point farthest above the line from the cheapest point to the one that saves most, with
    both axes scaled to 1 (Satopää et al., "Finding a 'Kneedle' in a Haystack", 2011)."""
    front = _front(found)
    if len(front) < 3:
        return front[-1] if front else None
    first, last = front[0], front[-1]
    wide, high = last.peak_bytes - first.peak_bytes, last.saved - first.saved
    return max(front, key=lambda p: (p.saved - first.saved) / high - (p.peak_bytes - first.peak_bytes) / wide)


def table(found: list[OverSamplingPoint]) -> list[list[str]]:
    """Header and a line per point."""
    best = knee(found)
    head = [
        "admission",
        "peak bytes carried",
        "MB by tier",
        "tokens carried",
        "idle slot-seconds a round",
        "saved",
        "of the limit",
        "",
    ]
    return [
        head,
        *(
            [
                *(p.name, f"{p.peak_bytes:,}", p.by_tier, f"{p.carry:,.0f}"),
                *(f"{p.idle:.1f}", f"{p.saved:.1f}", f"{p.share:.2f}"),
                "knee" if p is best else "",
            ]
            for p in found
        ),
    ]


def _name(row: Row) -> str | None:
    if not (row["ablation"] or "").startswith(ABLATION) or row["variant"] not in (FIXED, DRIVEN):
        return None
    what = row["ablation"].removeprefix(ABLATION)
    return DEMAND if what == DEMAND else f"{float(what):g}×"


def _idle(rows: list[Row], speed: float) -> float:
    """Assumes that the mean batch of decode steps is the mean over time."""
    return mean(
        row["seconds"] / row["rounds"] * limit_of(row) / speed
        * (row["plan"]["slots"] - (row["mean_running"] or 0.0))
        for row in rows
    )  # fmt: skip


def _front(found: Iterable[OverSamplingPoint]) -> list[OverSamplingPoint]:
    """The Pareto front by bytes: points that no cheaper point matches."""
    front: list[OverSamplingPoint] = []
    for point in sorted(found, key=lambda p: (p.peak_bytes, -p.saved)):
        if not front or point.saved > front[-1].saved:
            front.append(point)
    assert all(one.peak_bytes < two.peak_bytes for one, two in pairwise(front))
    return front
