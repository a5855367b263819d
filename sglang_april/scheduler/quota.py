"""When a round ends and what it delivers (`quota-exact`).

Pure functions of the ledger and the policy version. "Counted units" are whole groups (`quota_unit: group`) or
finished samples (`quota_unit: sample`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from sglang_april.api.messages import Delivery, EndReason, RoundSpec, Tuned
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Group, Sample, State
from sglang_april.scheduler.stats import RoundStats


@dataclass(eq=False, slots=True)
class Round:
    """A round in the scheduler: what its request asks for, and its progress."""

    spec: RoundSpec
    run: Run
    number: int
    mandatory: set[Group] = field(default_factory=set)
    """Groups that must be whole before the round ends (`staleness-bound`). A prompt id may recur as another group."""
    cohort: set[Group] = field(default_factory=set)
    """With `quota_mode: cohort`, groups that first ran at least `cohort_rounds` rounds ago (`cohort-before-end`)."""
    stats: RoundStats = field(default_factory=RoundStats)
    tuned: Tuned | None = None
    """The current value of `concurrency: auto`; None: all slots."""
    last_first: int = -1
    """The step in which its run was last the first one to get slots (`fair-slots`)."""
    waits: bool = False
    """Its quota is met, and groups that must finish are not whole."""
    limit_reached: bool = False
    """The round is over and its run has reached the limit of running ahead (`update_limit_reached`)."""

    @property
    def on_policy(self) -> bool:
        """`max_staleness: 0`: nothing is carried with tokens."""
        return self.spec.max_staleness == 0

    def mark_mandatory(self, version: int) -> None:
        """Add the stale groups; called at the start of the round and after every push inside it."""
        self.mandatory |= {g for g in self.run.groups.values() if g.is_stale(version, self.spec.max_staleness)}

    def mark_cohort(self) -> None:
        """Select the cohort; called at the start of the round."""
        if self.spec.quota_mode == "cohort":
            last = self.number - self.spec.cohort_rounds
            self.cohort = {g for g in self.run.groups.values() if 0 <= g.first_round <= last}

    @property
    def concurrency(self) -> int | None:
        """Samples of the run that may run at once; None: all slots."""
        if self.spec.concurrency == "auto":
            return self.tuned.concurrency if self.tuned is not None else None
        return self.spec.concurrency

    @property
    def judged(self) -> bool:
        """`count: accepted`: only groups that the caller has accepted count."""
        return self.spec.judged

    def must_finish(self, group: Group) -> bool:
        return (
            group in self.mandatory or group in self.cohort or (self.on_policy and group.oldest_version() is not None)
        )

    def waiting_for(self) -> list[str]:
        """Ids of the mandatory groups that are not whole."""
        return [g.id for g in self.run.groups.values() if g in self.mandatory and not g.whole]

    # --- counting

    def counted(self) -> int:
        """Units that count towards the quota so far."""
        if self.judged:
            accepted = [g for g, verdict in self.run.verdicts.items() if verdict]
            return sum(len(g.samples) for g in accepted) if self.spec.quota_unit == "sample" else len(accepted)
        return self.run.finished if self.spec.quota_unit == "sample" else self.run.whole

    def has_met_quota(self) -> bool:
        """Enough units count, although the round may wait for mandatory ones."""
        return self.spec.quota is not None and self.counted() >= self.spec.quota

    def ends_now(self) -> EndReason | None:
        """Why the round ends now, or None."""
        if self.spec.quota is not None and self.counted() >= self.spec.quota:
            return None if self._any_must_finish() else "quota"
        settled = self.run.whole if not self.judged else len(self.run.verdicts)
        return "exhausted" if settled == len(self.run.groups) else None

    def _any_must_finish(self) -> bool:
        groups = self.run.groups
        if self.on_policy and any(not g.whole and g.oldest_version() is not None for g in groups.values()):
            return True
        return any(not g.whole and groups.get(g.id) is g for g in (*self.mandatory, *self.cohort))

    def starts_left(self) -> int | None:
        """How many more groups may start; None: any number. With `max_staleness: 0` no more than the quota needs."""
        if not self.on_policy or self.spec.quota is None:
            return None
        begun = [g for g in self.run.groups.values() if g.begun and not (self.judged and g.accepted is False)]
        if self.spec.quota_unit == "group":
            return max(0, self.spec.quota - len(begun))
        return 1 if sum(len(g.samples) for g in begun) < self.spec.quota else 0

    def may_start(self, new: Iterable[Group]) -> Iterator[Group]:
        """Those of the groups that have not begun that may start, in their order."""
        return islice(new, self.starts_left())

    # --- after the reply

    def run_ahead(self) -> None:
        """Let the run of an ended round run ahead (`after_quota: continue`), with separate statistics."""
        self.mandatory = {g for g in self.mandatory if self.run.groups.get(g.id) is g}
        self.cohort, self.stats = set(), RoundStats()

    def update_limit_reached(self) -> bool:
        """Whether to stop running ahead: `ahead` quotas wait, or some group has reached the bound."""
        waiting = self.run.finished if self.spec.quota_unit == "sample" else self.run.whole
        enough = self.spec.quota is not None and waiting >= self.spec.ahead * self.spec.quota
        bound = any(self.run.groups.get(g.id) is g for g in self.mandatory)
        self.limit_reached = enough or bound or self.on_policy
        return self.limit_reached

    # --- delivery

    def deliver(self, ledger: Ledger, reason: EndReason, ids: list[str] | None, version: int) -> list[Delivery]:
        """Units of the reply in delivery order: mandatory, then by finish step (carried first), then by admission."""
        wanted = None if ids is None else set(ids)
        ready = [g for g in self.run.groups.values() if wanted is None or g.id in wanted]
        units = self._sample_units(ready) if self.spec.quota_unit == "sample" else self._group_units(ready)
        units.sort(
            key=lambda unit: (
                not self.must_finish(unit[0].group),
                max(s.finish_step for s in unit),
                unit[0].queue_position,
            )
        )
        if self.spec.surplus == "carry" and ids is None:
            units = self._without_surplus(units, self.spec.quota if reason == "quota" else None)
        chosen: dict[Group, list[int]] = {}
        for unit in units:
            chosen.setdefault(unit[0].group, []).extend(s.index for s in unit)
        for group in chosen:
            self.stats.over_bound += group.is_over(version, self.spec.max_staleness)
        return [ledger.deliver(group, indices) for group, indices in chosen.items()]

    def _without_surplus(self, units: list[list[Sample]], quota: int | None) -> list[list[Sample]]:
        """Units without surplus: the first `quota` (None: all) that count, and those that are always delivered."""
        chosen, left = [], len(units) if quota is None else quota
        for unit in units:
            group = unit[0].group
            counts = not self.judged or group.accepted is True
            if (counts and left > 0) or self.must_finish(group) or (self.judged and group.accepted is False):
                chosen.append(unit)
                left -= counts
        return chosen

    @staticmethod
    def _group_units(groups: list[Group]) -> list[list[Sample]]:
        return [sorted(g.samples.values(), key=lambda s: s.queue_position) for g in groups if g.whole]

    @staticmethod
    def _sample_units(groups: list[Group]) -> list[list[Sample]]:
        return [[s] for g in groups for s in g.samples.values() if s.state is State.FINISHED]
