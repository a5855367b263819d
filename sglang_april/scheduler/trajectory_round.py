"""When a round of trajectories ends, and what it delivers (docs/trajectories.md)."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang_april.api.messages import Delivery, EndReason
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group
from sglang_april.scheduler.stats import RoundStats
from sglang_april.scheduler.trajectories import Trajectory
from sglang_april.scheduler.trajectory_run import TrajectoryRun


@dataclass(eq=False, slots=True)
class TrajectoryRound(Round):
    """A round whose units are trajectories, or groups of `spec.n` of them; its `run` is the run of the legs."""

    trajectories: TrajectoryRun = field(kw_only=True)
    stale: set[Trajectory] = field(default_factory=set)
    """Those that had reached `max_staleness`: they are done before the round ends (`staleness-bound`)."""
    delivered: list[str] = field(default_factory=list)
    legs: dict[str, int] = field(default_factory=dict)
    """Of those that are delivered, how many legs their records have."""
    surplus: list[str] = field(default_factory=list)
    """Members of delivered groups beyond `n`, which leave with them."""

    def mark_mandatory(self, version: int) -> None:
        """As for any round, by trajectory."""
        bound = self.spec.max_staleness
        if bound is not None:
            active = self.trajectories.active.values()
            self.stale |= {t for t in active if t.oldest is not None and t.staleness(version) >= bound}

    def mark_cohort(self) -> None:
        """A request for trajectories has no cohort."""

    def must_finish(self, group: Group) -> bool:
        return group.leg is not None and self._is_mandatory(group.leg.trajectory)

    def _is_mandatory(self, trajectory: Trajectory) -> bool:
        return trajectory in self.stale or (self.on_policy and trajectory.oldest is not None)

    def waiting_for(self) -> list[str]:
        """The mandatory trajectories that are not done."""
        return [t.id for t in self.trajectories.active.values() if self._is_mandatory(t) and not t.done]

    # --- counting

    def units(self) -> list[list[Trajectory]]:
        """What is done and whole, mandatory ones first, then in the order in which they were done."""
        done = self.trajectories.done
        if self.spec.quota_unit == "trajectory":
            units = [[t] for t in done]
        else:
            groups: dict[str, list[Trajectory]] = {}
            for t in done:
                groups.setdefault(t.group, []).append(t)
            whole = [members[: self.spec.n] for members in groups.values() if len(members) >= self.spec.n]
            order = {t: i for i, t in enumerate(done)}
            units = sorted(whole, key=lambda members: order[members[-1]])
        return sorted(units, key=lambda unit: not any(map(self._is_mandatory, unit)))

    def counted(self) -> int:
        return len(self.units())

    def ends_now(self) -> EndReason | None:
        """Only the quota ends it: trajectories begin while it is open."""
        if self.spec.quota is None or self.counted() < self.spec.quota:
            return None
        return None if self.waiting_for() else "quota"

    def may_start(self, new: Iterable[Group]) -> Iterator[Group]:
        """As for any round, by trajectory, of which `new` has one group for each leg.

        With `max_staleness: 0` no more trajectories begin than the quota needs, and of a group no more than `spec.n`.
        """
        if not self.on_policy or self.spec.quota is None:
            yield from new
            return
        by_group = self.spec.quota_unit == "group"
        most = self.spec.n if by_group else 1
        begun = [t for t in self.trajectories.active.values() if t.begun or t.done]
        members = Counter(t.group if by_group else t.id for t in begun)
        starting: set[Trajectory] = set()
        for group in new:
            if group.leg is None:
                continue
            trajectory = group.leg.trajectory
            unit = trajectory.group if by_group else trajectory.id
            if trajectory not in starting:
                if members[unit] >= most or (not members[unit] and len(+members) >= self.spec.quota):
                    continue
                members[unit] += 1
                starting.add(trajectory)
            yield group

    # --- after the reply

    def run_ahead(self) -> None:
        """As for any round."""
        self.stale = {t for t in self.stale if self.trajectories.active.get(t.id) is t}
        self.stats = RoundStats()

    def update_limit_reached(self) -> bool:
        """As for any round."""
        enough = self.spec.quota is not None and self.counted() >= self.spec.ahead * self.spec.quota
        self.limit_reached = enough or bool(self.waiting_for()) or self.on_policy
        return self.limit_reached

    def deliver(self, _ledger: Ledger, reason: EndReason, ids: list[str] | None, version: int) -> list[Delivery]:
        """Fix `delivered` and `surplus`; there are no samples."""
        units = [unit for unit in self.units() if ids is None or any(t.id in ids for t in unit)]
        if reason != "stopped" and self.spec.surplus == "carry" and self.spec.quota is not None:
            mandatory = [u for u in units[self.spec.quota :] if any(map(self._is_mandatory, u))]
            units = [*units[: self.spec.quota], *mandatory]
        chosen = [t for unit in units for t in unit]
        groups = {t.group for t in chosen} if self.spec.quota_unit == "group" else set()
        for trajectory in chosen:
            bound = self.spec.max_staleness
            self.stats.over_bound += bound is not None and trajectory.staleness(version) > bound
            self.trajectories.deliver(trajectory)
        self.delivered = [t.id for t in chosen]
        self.legs = {t.id: t.legs_ended for t in chosen}
        self.surplus = [t.id for t in self.trajectories.active.values() if t.group in groups]
        return []

    def report(self, version: int) -> list[dict[str, Any]]:
        """`carried.trajectories` of the reply."""
        waiting = set(self.waiting_for())
        return [{**t.report(version), "mandatory": t.id in waiting} for t in self.trajectories.active.values()]
