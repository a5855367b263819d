"""The trajectories of a run: which are active, done, or have left. Pure, and replicated on every rank."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import SavedTrajectory
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.trajectories import Ids, Leg, Trajectory

MAX_ENDED = 2**16
"""Ended trajectories of a run that are remembered, so that a repeated message changes nothing."""
MAX_WITHOUT_ROUNDS = 2**10
"""Trajectories kept of a run that has never had a round: no caller ends them."""
Outcome = Literal["done", "rejected"]


@dataclass(eq=False, slots=True)
class TrajectoryRun:
    """The trajectories of a run."""

    name: str
    legs: Run
    """The run of its pending legs in the ledger."""
    active: "OrderedDict[str, Trajectory]" = field(default_factory=OrderedDict)
    """Those that have not left, the one that was used last at the end."""
    done: dict[Trajectory, None] = field(default_factory=dict)
    """Those of them that are done, in order."""
    ended: "OrderedDict[str, Outcome]" = field(default_factory=OrderedDict)
    """How trajectories have ended, the last ones, delivered ones included."""
    rejected: dict[str, None] = field(default_factory=dict)
    """Those of them that have been rejected since the last reply."""
    ends: int = 0
    """Trajectories that have ended so far."""

    @property
    def rounds_opened(self) -> int:
        """Rounds of trajectories that the run has had."""
        return self.legs.rounds_opened

    def restore(self, saved: list[SavedTrajectory]) -> None:
        """After a restart: add the trajectories of this run, in the order in which they began."""
        for one in saved:
            if one.state in ("active", "done"):
                trajectory = Trajectory(self, one.id, one.group, oldest=one.oldest)
                trajectory.restore_legs(one.legs)
                trajectory.end_number, trajectory.result = one.end_number, one.result
                self.active[one.id] = trajectory
        for one in sorted(saved, key=lambda t: t.end_number):
            if one.outcome:
                self._remember(one.id, one.outcome)
            if one.state == "done":
                self.done[self.active[one.id]] = None
            elif one.state == "rejected":
                self.rejected[one.id] = None
            self.ends = max(self.ends, one.end_number + 1)

    def recorded(self, name: str, rid: str) -> bool:
        """Whether a request is a leg that had ended before a restart."""
        known = self.active.get(name)
        return known is not None and rid in known.restored

    def refusal(self, name: str, group: str | None) -> str:
        """Why no request can be a leg of this trajectory, or an empty string."""
        if name in self.ended:
            return f"x-april-trajectory: {name!r} has ended ({self.ended[name]})"
        known = self.active.get(name)
        if known is not None and group is not None and known.group != group:
            return f"x-april-group: trajectory {name!r} belongs to group {known.group!r}"
        return ""

    def begin_leg(self, name: str, group: str | None, rid: str, prompt: Ids) -> Leg:
        """A request arrives that `refusal` does not refuse."""
        trajectory = self.active.get(name)
        if trajectory is None:
            trajectory = self.active[name] = Trajectory(self, name, group or name)
        if not self.rounds_opened:
            self.active.move_to_end(name)
        return trajectory.new_leg(rid, prompt)

    def unused(self) -> list[Trajectory]:
        """Without rounds: the least recently used trajectories beyond those that are kept."""
        if self.rounds_opened or len(self.active) <= MAX_WITHOUT_ROUNDS:
            return []
        idle = [t for t in self.active.values() if not t.pending]
        return idle[: len(self.active) - MAX_WITHOUT_ROUNDS]

    def forget(self, trajectories: Iterable[Trajectory]) -> None:
        """They are no longer kept, done ones included."""
        for trajectory in trajectories:
            del self.active[trajectory.id]
            self.done.pop(trajectory, None)

    def check(self, done: Iterable[str], reject: Iterable[str]) -> None:
        """Refuse a message that ends an unknown trajectory as done, or one that has ended the other way; nothing
        changes.

        Raises:
            RequestError: 404 or 409.
        """
        wanted: tuple[tuple[str, Outcome, Iterable[str]], ...] = (
            ("trajectories", "done", done),
            ("reject", "rejected", reject),
        )
        for name, outcome, ids in wanted:
            for i in ids:
                before = self.ended.get(i)
                if before is None and outcome == "done" and i not in self.active:
                    raise RequestError(404, name, f"run {self.name!r} has no trajectory {i!r}")
                if before is not None and before != outcome:
                    raise RequestError(409, name, f"trajectory {i!r} has ended: {before}")

    def end(self, name: str, outcome: Outcome, result: bytes = b"") -> Trajectory | None:
        """A trajectory that `check` has passed ends; None if it had ended before.

        An unknown one is rejected before its first request, which may be on its way: that request is then refused,
        because no caller would end the trajectory that it began.

        `result`: the caller's reward and metadata.
        """
        if name in self.ended:
            return None
        trajectory = self.active.get(name) or Trajectory(self, name, name)
        self._end(trajectory, outcome, result)
        if outcome == "done":
            self.done[trajectory] = None
        elif self.active.pop(name, None) is not None:
            self.rejected[name] = None
        return trajectory

    def drop(self, name: str) -> Trajectory | None:
        """Delete a trajectory, also a done one, for which a repeated message still changes nothing; None if it has
        left."""
        trajectory = self.active.pop(name, None)
        if trajectory is not None:
            self.done.pop(trajectory, None)
            self._end(trajectory, self.ended.get(name, "rejected"))
        return trajectory

    def _end(self, trajectory: Trajectory, outcome: Outcome, result: bytes = b"") -> None:
        self._remember(trajectory.id, outcome)
        trajectory.end_number, trajectory.result = self.ends, result
        self.ends += 1

    def _remember(self, name: str, outcome: Outcome) -> None:
        self.ended[name] = outcome
        if len(self.ended) > MAX_ENDED:
            oldest, _ = self.ended.popitem(last=False)
            self.rejected.pop(oldest, None)

    def deliver(self, trajectory: Trajectory) -> None:
        """A reply contains it: it leaves."""
        del self.active[trajectory.id]
        del self.done[trajectory]
