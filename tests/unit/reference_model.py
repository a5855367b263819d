"""An independent model of groups and rounds, fed with events only: when rounds end, and what they deliver.

Checks `stop-in-step`, `quota-exact`, `staleness-bound` and `delivered-once`, written differently than the product.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_april.api import messages
from sglang_april.scheduler.ledger import Ledger
from tests.unit.fake_request import Request

Key = tuple[str, str, int]
"""A group: run, id, incarnation."""


class FinishedEntry(NamedTuple):
    """A finished sample that is not delivered yet."""

    step: int
    order: int
    """Position of its first admission."""
    oldest: int | None
    """Version of its first token."""


@dataclass(eq=False, slots=True)
class ModelGroup:
    key: Key
    undelivered: set[int]
    finished: dict[int, FinishedEntry] = field(default_factory=dict)
    accepted: bool | None = None
    first_round: int | None = None
    """Round in which it got its first token; running ahead counts as the next round."""

    @property
    def whole(self) -> bool:
        return len(self.finished) == len(self.undelivered)


@dataclass(eq=False, slots=True)
class ModelRound:
    spec: messages.RoundSpec
    begun_before: int = 0
    """Groups that had begun when the round opened."""
    number: int = 0
    """Number of the round within its run, from 1."""
    mandatory: set[Key] = field(default_factory=set)
    stop: messages.StopRound | None = None
    generated: int = 0
    reprefilled: int = 0
    before: tuple[int, int] | None = None
    """Tokens generated and prefilled again while the run ran ahead of this round."""


class ReferenceModel:
    """Every sample that was ever accepted, and the open rounds."""

    ledger: Ledger
    """Used only to find the engine's request of a sample."""

    def __init__(self) -> None:
        self.version = 0
        self.groups: dict[Key, ModelGroup] = {}
        """Undelivered groups."""
        self.rounds: dict[str, ModelRound] = {}
        """Open rounds by run."""
        self.ahead: dict[str, ModelRound] = {}
        """Rounds that have ended, by run, while the run runs ahead."""
        self.opened: Counter[str] = Counter()
        self.incarnations: Counter[tuple[str, str]] = Counter()
        self.fate: dict[tuple[Key, int], str] = {}
        """Fate of every sample ever accepted: "live", "delivered" or "dropped"."""

    def due(self, rnd: ModelRound) -> messages.EndReason | None:
        """Why the round must end now; None if it must not."""
        groups = list(self.of(rnd.spec.run))
        counted = [g for g in groups if self.counts(rnd, g)]
        done = (
            sum(len(g.finished) for g in counted) if rnd.spec.quota_unit == "sample" else sum(g.whole for g in counted)
        )
        if rnd.spec.quota is not None and done >= rnd.spec.quota:
            return None if any(self.must(rnd, g) and not g.whole for g in groups) else "quota"
        judging = rnd.spec.count == "accepted"
        return "exhausted" if all(g.whole and not (judging and g.accepted is None) for g in groups) else None

    def counts(self, rnd: ModelRound, group: ModelGroup) -> bool:
        return rnd.spec.count == "finished" or group.accepted is True

    def rests(self, rnd: ModelRound) -> bool:
        """Whether running ahead has reached its limit."""
        groups = list(self.of(rnd.spec.run))
        done = sum(len(g.finished) if rnd.spec.quota_unit == "sample" else g.whole for g in groups)
        if rnd.spec.quota is not None and done >= rnd.spec.ahead * rnd.spec.quota:
            return True
        bound = rnd.spec.max_staleness
        ages = [self.version - oldest for g in groups if (oldest := self.oldest(g)) is not None]
        return bound == 0 or (bound is not None and max(ages, default=-1) >= bound)

    def must(self, rnd: ModelRound, group: ModelGroup) -> bool:
        spec, first = rnd.spec, group.first_round
        old = spec.quota_mode == "cohort" and first is not None and rnd.number - first >= spec.cohort_rounds
        return old or group.key in rnd.mandatory or (rnd.spec.max_staleness == 0 and self.oldest(group) is not None)

    def oldest(self, group: ModelGroup) -> int | None:
        """Version of the oldest token of any undelivered sample."""
        versions = [e.oldest for e in group.finished.values()] + [oldest_of(r) for r in self.requests(group)]
        return min((v for v in versions if v is not None), default=None)

    def mark(self, rnd: ModelRound) -> None:
        bound = rnd.spec.max_staleness
        for group in self.of(rnd.spec.run):
            oldest = self.oldest(group)
            if bound is not None and oldest is not None and self.version - oldest >= bound:
                rnd.mandatory.add(group.key)

    def of(self, run: str) -> Iterator[ModelGroup]:
        return (g for k, g in self.groups.items() if k[0] == run)

    def requests(self, group: ModelGroup) -> Iterator[Request]:
        """The engine's requests of the group's unfinished samples."""
        run, name, _ = group.key
        live = (self.ledger.runs[run].groups[name].samples[i] for i in group.undelivered - set(group.finished))
        return (s.request for s in live if s.request is not None)

    def check_delivery(self, rnd: ModelRound, e: messages.RoundEnded) -> None:
        """Check which units are delivered, how many, and in which order."""
        units: list[tuple[tuple[bool, int, int], Key, list[int]]] = []
        for group in self.of(e.run):
            if rnd.stop and rnd.stop.deliver is not None and group.key[1] not in rnd.stop.deliver:
                continue
            whole = [list(group.finished)] if group.whole else []
            for part in [[i] for i in group.finished] if rnd.spec.quota_unit == "sample" else whole:
                step, order = max(group.finished[i].step for i in part), min(group.finished[i].order for i in part)
                units.append(((not self.must(rnd, group), step, order), group.key, part))
        units.sort()
        if rnd.spec.surplus == "carry" and not (rnd.stop and rnd.stop.deliver is not None):
            counting = [u for u in units if self.counts(rnd, self.groups[u[1]])]
            if e.end_reason == "quota":
                counting = counting[: rnd.spec.quota]
            units = [u for u in units if u in counting or self.always_delivered(rnd, self.groups[u[1]])]
        expected: dict[Key, list[int]] = {}
        for _, key, part in units:
            expected[key] = sorted(expected.get(key, []) + part)
        assert [((e.run, d.id, d.incarnation), d.indices) for d in e.deliver] == list(expected.items())
        assert all(d.accepted is self.groups[e.run, d.id, d.incarnation].accepted for d in e.deliver)
        self.check_quota(rnd, e)

    def check_quota(self, rnd: ModelRound, e: messages.RoundEnded) -> None:
        """Exactly `quota` units that count; beyond them mandatory and rejected groups, and surplus if asked."""
        groups = [(d, self.groups[e.run, d.id, d.incarnation]) for d in e.deliver]
        if e.end_reason == "quota":
            size = [(len(d.indices) if rnd.spec.quota_unit == "sample" else 1, g) for d, g in groups]
            counted = sum(n for n, g in size if self.counts(rnd, g))
            extra = sum(n for n, g in size if self.counts(rnd, g) and self.always_delivered(rnd, g))
            assert counted >= (rnd.spec.quota or 0)
            assert counted == rnd.spec.quota or counted == extra or rnd.spec.surplus == "return"
            if rnd.spec.surplus == "carry":
                assert all(self.counts(rnd, g) or self.always_delivered(rnd, g) for _, g in groups)

    def always_delivered(self, rnd: ModelRound, group: ModelGroup) -> bool:
        """Whether the group is delivered at the end of the round regardless of the quota."""
        return self.must(rnd, group) or (rnd.spec.count == "accepted" and group.accepted is False)

    def leave(self, key: Key, index: int, how: str) -> None:
        assert self.fate[key, index] == "live", f"{key}[{index}] is {how} after it was {self.fate[key, index]}"
        self.fate[key, index] = how


def oldest_of(request: Request) -> int | None:
    return request.drawn_under[0][0] if request.drawn_under else None
