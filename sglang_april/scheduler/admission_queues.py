"""What waits for a slot in a run: suspended samples, and groups with queued members, in the order of admission."""

import bisect
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_april.scheduler.state import Group, Sample


class SuspendedSamples(dict["Sample", None]):
    """The suspended samples of a run: a set with an admission order that is sorted again only after additions."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Sample] | None = None

    def __setitem__(self, sample: "Sample", value: None) -> None:
        super().__setitem__(sample, value)
        self._queue = None

    def in_order(self) -> "Iterator[Sample]":
        """The samples in admission order."""
        if self._queue is None:
            self._queue = deque(sorted(self, key=lambda s: s.queue_position))
        while self._queue and self._queue[0] not in self:
            self._queue.popleft()
        return (s for s in self._queue if s in self)


@dataclass(eq=False, slots=True)
class QueuedGroups:
    """The groups of a run with queued members, so that admission never searches a large pool of prompts.

    `Group.queue` names the queue that holds a group.
    """

    begun: "dict[Group, None]" = field(default_factory=dict)
    """Groups that have begun."""
    new: "list[Group]" = field(default_factory=list)
    """Groups that have not begun, in arrival order."""

    def __bool__(self) -> bool:
        return bool(self.begun or self.new)

    def update(self, group: "Group") -> None:
        """Put the group into the queue where it belongs now, or into none."""
        queue = ("begun" if group.begun else "new") if group.queued else ""
        if queue == group.queue:
            return
        self.remove(group)
        group.queue = queue
        if queue == "begun":
            self.begun[group] = None
        elif queue == "new":
            bisect.insort(self.new, group, key=lambda g: g.gid)

    def remove(self, group: "Group") -> None:
        """Take the group out of its queue."""
        if group.queue == "begun":
            del self.begun[group]
        elif group.queue == "new":
            del self.new[bisect.bisect_left(self.new, group.gid, key=lambda g: g.gid)]
        group.queue = ""
