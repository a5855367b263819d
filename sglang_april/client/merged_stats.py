"""Statistics of one round over several engines."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

EXTREMES: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    "t_opened": min,
    "t_quota_met": max,
    "t_ended": max,
    "oldest_staleness": max,
    "prolonged": any,
}
"""How fields are merged that cannot be added up."""
OBJECTS = ("bytes", "tokens_by_tier")
"""Fields that are objects of numbers."""


def merge_stats(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums; the longest duration; the timelines added up; each warning once. `delivered` is left out: its quantiles
    and shares cannot be merged."""
    duration = max(part["duration_s"] for part in parts)
    running_seconds = sum(part.get("mean_running", 0.0) * part["duration_s"] for part in parts)
    changes = sorted(
        (at, running - before)
        for part in parts
        for (at, running), before in zip(part["timeline"], [0, *(x for _, x in part["timeline"])], strict=False)
    )
    timeline, total = [], 0
    for at, change in changes:
        total += change
        timeline.append([at, total])
    mean = running_seconds / duration if duration else 0.0
    warnings = list(dict.fromkeys(warning for part in parts for warning in part.get("warnings", ())))
    own = {"duration_s": duration, "mean_running": mean, "timeline": timeline}
    return {**sum_fields(parts), **own, **({"warnings": warnings} if warnings else {})}


def sum_fields(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all fields that are numbers in every part, or objects of numbers; of times and ages the extreme."""
    merged: dict[str, Any] = {}
    for name in parts[0]:
        values = [part[name] for part in parts if part.get(name) is not None]
        if values and name in EXTREMES:
            merged[name] = EXTREMES[name](values)
        elif len(values) == len(parts) and all(isinstance(value, int | float) for value in values):
            merged[name] = sum(values)
        elif len(values) == len(parts) and name in OBJECTS:
            merged[name] = sum_fields(values)
    return merged
