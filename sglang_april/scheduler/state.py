"""The scheduler's data: samples and groups, and the spans of a sample; `runs.py` has the runs.

Plain Python without SGLang or torch. A `Sample` is always in exactly one `State`; it leaves the ledger when it is
delivered or dropped. Terms are those of the glossary in docs/design.md.
"""

import enum
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_april.api.messages import FinishedSample, Prompt, Provenance, Span
from sglang_april.kv.cost_model import Reason
from sglang_april.kv.kv_pages import Pages, Prefix
from sglang_april.recovery.journal_snapshot import Chunk

if TYPE_CHECKING:
    from sglang_april.scheduler.runs import Run
    from sglang_april.scheduler.trajectories import Leg


class State(enum.Enum):
    """Where a sample is (`one-place`)."""

    QUEUED = "queued"
    """Accepted, without output tokens; not in the engine."""
    RUNNING = "running"
    """In one of the engine's queues or batches."""
    SUSPENDED = "suspended"
    """Has output tokens, and KV pages where they were kept; not in the engine."""
    FINISHED = "finished"
    """Ended but not delivered; its tokens have left the scheduler."""
    PARKED = "parked"
    """Between two legs of a trajectory: holds the KV of the one that has ended."""

    __hash__ = object.__hash__  # by identity; `enum` hashes the name in Python code


_ALLOWED = {
    State.QUEUED: {State.RUNNING, State.PARKED},
    State.RUNNING: {State.QUEUED, State.SUSPENDED, State.FINISHED, State.PARKED},
    State.SUSPENDED: {State.RUNNING, State.PARKED},
    State.FINISHED: set[State](),
    State.PARKED: {State.QUEUED},
}


_NO_SAMPLES = dict.fromkeys(State, 0)


@dataclass(eq=False, slots=True)
class Proximal:
    """Logprobs of old tokens under the policy that recomputed them, collected per prefill chunk."""

    version: int
    parts: list[tuple[int, Any]] = field(default_factory=list)
    """(index of the first output token, float32 [tokens] on the device)."""


class LedgerError(AssertionError):
    """A transition that would lose a sample or count it twice."""


@dataclass(eq=False, slots=True)
class SampleKv:
    """The KV of a sample; `Tiers` changes it while the sample is suspended."""

    pages: Pages | None = None
    """KV pages of a suspended sample; None if only its tokens are left, and while it runs. Of a leg without tokens, the
    KV of its prompt's first tokens, from an earlier leg."""
    prefix: Prefix | None = None
    """The stored prefix that its first tokens equal; kept while it runs on the KV that was loaded from there."""
    version: int = 0
    """Oldest policy version that wrote one of its pages; meaningless without KV."""
    quantized: bool = False
    """Whether some of its pages were restored from lossy ones (`--april-kv-pages int8`)."""
    loaded: bool = False
    """Whether some of its pages were restored, from any copy: their slots are others than those that were computed."""

    def begin(self, version: int) -> None:
        """All of its pages are computed under this version, from the first one on."""
        self.version, self.quantized, self.loaded = version, False, False


@dataclass(eq=False, slots=True)
class Recompute:
    """The prefill that replaces the KV of a sample with output tokens."""

    in_progress: bool = False
    """Queued in the engine for a prefill of prompt and old tokens."""
    reason: Reason = ""
    """Why its KV was discarded by choice, until its next token."""
    proximal: Proximal | None = None
    """Proximal logprobs of the last recompute that collects them."""


@dataclass(eq=False, slots=True)
class JournalMarks:
    """What the journal holds of a sample; `Recorder` maintains it."""

    snapshot: Chunk | None = None
    """After a restart, until the sample enters the engine: its tokens as read from the journal."""
    tokens: int = 0
    """Output tokens in the journal, including records not yet committed."""
    proximal_version: int = -1
    """Version of the proximal logprobs in the journal."""
    admission: bool = False
    """Whether its first admission is recorded."""
    first_token: bool = False
    """Whether it is recorded that the sample has tokens."""
    answered: FinishedSample | None = None
    """An attached request that an earlier server had answered."""


@dataclass(eq=False, slots=True)
class Sample:
    """One response being generated for one prompt."""

    group: "Group"
    index: int
    seed: int
    state: State = State.QUEUED
    length: int = 0
    """Output tokens so far, from the first admission on. While it runs, those that are counted (`Context.count`)."""
    spans: list[Span] = field(default_factory=list)
    queue_position: int = -1
    """Number of its first admission, -1 before it. Suspending keeps it, so a resumed batch has its old order."""
    request: Any = None
    """The engine's request object."""
    finish_step: int = -1
    admitted_round: int = -1
    kv: SampleKv = field(default_factory=SampleKv)
    recompute: Recompute = field(default_factory=Recompute)
    journal: JournalMarks = field(default_factory=JournalMarks)
    attached: bool = field(init=False)
    """Whether it is a request of SGLang's own routes, which answers its caller itself."""

    def __post_init__(self) -> None:
        self.attached = self.group.run.attached

    def move(self, to: State) -> None:
        """Change the state and every counter of it.

        Raises:
            LedgerError: the transition is not allowed; nothing changes.
        """
        if to not in _ALLOWED[self.state]:
            raise LedgerError(f"{self.group.id}[{self.index}]: {self.state.value} -> {to.value}")
        self.group.counts[self.state] -= 1
        self.group.counts[to] += 1
        self.group.run.running += (to is State.RUNNING) - (self.state is State.RUNNING)
        self.state = to

    def open_span(self, version: int, kv: Provenance) -> None:
        """Start a span at the next output token; a no-op if neither version nor provenance changes."""
        if self.spans and self.spans[-1].start == self.length:
            self.spans.pop()
        if not (self.spans and self.spans[-1].version == version and self.spans[-1].kv == kv):
            self.spans.append(Span(self.length, self.length, version, kv))

    def closed_spans(self, length: int | None = None) -> list[Span]:
        """The non-empty spans with their ends set; the last one ends at `length`, by default the sample's."""
        end = self.length if length is None else length
        ends = [*(s.start for s in self.spans[1:]), end]  # a sample that never entered the engine has no span
        return [Span(s.start, e, s.version, s.kv) for s, e in zip(self.spans, ends, strict=False) if e > s.start]

    @property
    def arriving(self) -> bool:
        """Whether it is an attached request that the engine has queued itself, as one of any client."""
        return self.attached and self.admitted_round < 0 and not self.length

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the first output token; None without tokens."""
        return self.spans[0].version if self.length else None


@dataclass(eq=False, slots=True)
class Group:
    """The `n` samples of one prompt."""

    run: "Run"
    prompt: Prompt
    params: bytes
    incarnation: int
    gid: int
    """Number in order of arrival, counted since the server (or its journal) began; identifies it in the journal."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Undelivered samples by index."""
    counts: dict[State, int] = field(default_factory=_NO_SAMPLES.copy)
    queue: str = ""
    """Which of the run's admission queues holds the group: "new", "begun", or "" (`QueuedGroups`)."""
    prefix: Prefix | None = None
    """The stored prefix under which the prompt was last copied to the host."""
    leader: "Sample | None" = None
    """The sample whose prefill computes the prompt for the other members (`prompts.py`)."""
    prompt_version: int = -1
    """Policy version under which the engine last computed the prompt's KV; -1 if the engine has none."""
    first_round: int = -1
    """Number of the round in which it got its first token; running ahead counts as the next round. -1 = none yet."""
    engine_params: Any = None
    """Decoded sampling parameters, shared by the group (set by the adapter)."""
    engine_input_ids: Any = None
    """The prompt in the engine's form, also shared by the group (set by the adapter)."""
    leg: "Leg | None" = None
    """The leg of a trajectory that its only sample generates (`trajectories.py`)."""

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def whole(self) -> bool:
        """Every undelivered sample has finished."""
        return self.counts[State.FINISHED] == len(self.samples)

    @property
    def accepted(self) -> bool | None:
        """The caller's verdict; None without one."""
        return self.run.verdicts.get(self)

    @property
    def queued(self) -> int:
        """Number of queued samples."""
        return self.counts[State.QUEUED]

    @property
    def begun(self) -> bool:
        """Some member has been admitted or has finished, or it is a leg of a trajectory that has begun."""
        if self.leg is not None:
            return self.leg.trajectory.begun
        return len(self.samples) < self.prompt.n or self.queued < len(self.samples)

    def oldest_version(self) -> int | None:
        """Policy version of the oldest output token of any undelivered sample, including finished ones."""
        versions = [v for s in self.samples.values() if (v := s.oldest_version) is not None]
        return min(versions, default=None)

    def staleness(self, version: int) -> int:
        """`version` minus the version of the oldest undelivered output token; 0 without tokens."""
        oldest = self.oldest_version()
        return 0 if oldest is None else version - oldest

    def is_stale(self, version: int, bound: int | None) -> bool:
        """Whether a group with tokens has reached the bound, so that it is mandatory (`staleness-bound`)."""
        return bound is not None and self.oldest_version() is not None and self.staleness(version) >= bound

    def is_over(self, version: int, bound: int | None) -> bool:
        """Whether pushes between two rounds, or a `stop`, carried the group beyond the bound (`over_bound`)."""
        return bound is not None and self.staleness(version) > bound


def sample_seed(seed: int, prompt_id: str, incarnation: int, index: int) -> int:
    """63 bits of a hash of these four values only (`seed-independence`)."""
    text = f"{seed}\0{prompt_id}\0{incarnation}\0{index}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
