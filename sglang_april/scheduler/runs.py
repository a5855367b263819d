"""The scheduler's data about a run; `state.py` has its groups and samples."""

from collections import OrderedDict
from dataclasses import dataclass, field

from sglang_april.api.messages import KvPolicy
from sglang_april.api.run_keys import RunKind, run_key
from sglang_april.scheduler.admission_queues import QueuedGroups, SuspendedSamples
from sglang_april.scheduler.state import Group, Sample, State


@dataclass(eq=False, slots=True)
class Run:
    """One training run's samples of one kind: the owner of its prompts and partials."""

    name: str
    """As callers name it; a run of another kind can have the same name."""
    kind: RunKind = "prompts"
    key: str = field(init=False)
    """Of this run alone, in the ledger and the journal."""
    attached: bool = field(init=False)
    """Its samples are requests of SGLang's own routes, each a group of one that no round delivers."""
    groups: OrderedDict[str, Group] = field(default_factory=OrderedDict)
    """Undelivered groups by prompt id, in arrival order."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """Next incarnation of the prompt ids that were accepted last, the least recent first."""
    first_incarnation: int = 0
    """Next incarnation of all other ids: above that of every forgotten one, so that no incarnation repeats."""
    rounds_opened: int = 0
    whole: int = 0
    """Undelivered groups whose members have all finished."""
    finished: int = 0
    """Undelivered finished samples."""
    running: int = 0
    """Samples in the engine."""
    kv: KvPolicy = "keep"
    """KV policy of the latest round: which KV samples resume on, and between two rounds also which pages are copied."""
    max_staleness: int | None = None
    """Bound of the latest round, used likewise."""
    verdicts: dict[Group, bool] = field(default_factory=dict)
    """Undelivered groups that the caller has judged (`count: accepted`)."""
    suspended: SuspendedSamples = field(default_factory=SuspendedSamples)
    queued: QueuedGroups = field(default_factory=QueuedGroups)
    parked: dict[Sample, None] = field(default_factory=dict)
    """Samples that hold the KV of an ended leg: between two legs, and until the next leg's prefill is launched."""

    def __post_init__(self) -> None:
        self.key, self.attached = run_key(self.kind, self.name), self.kind != "prompts"

    def named(self, ids: list[str] | None) -> list[Group]:
        """Undelivered groups with one of these prompt ids; all when `ids` is None."""
        return [self.groups[i] for i in (self.groups if ids is None else dict.fromkeys(ids)) if i in self.groups]

    def samples(self, *states: State) -> list[Sample]:
        """Samples in one of the given states, in arrival order."""
        wanted = set(states)
        return [
            s
            for g in self.groups.values()
            if any(g.counts[state] for state in wanted)
            for s in g.samples.values()
            if s.state in wanted
        ]
