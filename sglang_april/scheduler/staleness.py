"""Step 3 of 9 (count): the staleness bound (S4). It never drops work: a group that reaches it must finish first."""

from sglang_april.scheduler.state import Group


def staleness(group: Group, version: int) -> int:
    """Current version minus the version of the oldest output token of any undelivered sample; 0 without tokens."""
    oldest = group.oldest_version()
    return 0 if oldest is None else version - oldest


def is_stale(group: Group, version: int, bound: int | None) -> bool:
    """The group has tokens and has reached the bound: it is mandatory in this round."""
    return bound is not None and group.oldest_version() is not None and staleness(group, version) >= bound


def is_over(group: Group, version: int, bound: int | None) -> bool:
    """Several pushes between two rounds, or a `stop`, carried the group beyond the bound (counted in `over_bound`)."""
    return bound is not None and staleness(group, version) > bound
