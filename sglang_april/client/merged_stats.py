"""Statistics of one round over several engines."""

from collections.abc import Mapping, Sequence
from typing import Any


def merge_stats(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums; the longest duration; the timelines added up."""
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
    return {**sum_fields(parts), "duration_s": duration, "mean_running": mean, "timeline": timeline}


def sum_fields(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of all fields that are numbers in every part."""
    names = [name for name in parts[0] if all(isinstance(part.get(name), int | float) for part in parts)]
    return {name: sum(part[name] for part in parts) for name in names}
