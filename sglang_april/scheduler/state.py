"""What exists in the scheduler: samples, groups and runs, and the spans of a sample.

Plain Python: no SGLang, no torch. A `Sample` is at every moment in exactly one `State`; it leaves the ledger when it is
delivered or dropped. Design words are used as in the README's glossary.
"""

import enum
import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang_april.api.messages import KvPolicy, Prompt, Provenance, Span
from sglang_april.kv.cost_model import Reason
from sglang_april.kv.kv_pages import Pages, Prefix
from sglang_april.recovery.journal_snapshot import Chunk


class State(enum.Enum):
    """Where a sample is (design rule 1: exactly one place)."""

    QUEUED = "queued"
    """Accepted, no output token; has no place in the engine."""
    RUNNING = "running"
    """In one of the engine's queues or batches."""
    SUSPENDED = "suspended"
    """Has output tokens, perhaps KV pages; takes no step."""
    FINISHED = "finished"
    """Ended, not yet delivered; its tokens have left the scheduler."""


_ALLOWED = {
    State.QUEUED: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.QUEUED, State.SUSPENDED, State.FINISHED},
    State.SUSPENDED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(eq=False, slots=True)
class Proximal:
    """Logprobs of old tokens under the policy that recomputed them (S7), collected prefill chunk by prefill chunk."""

    version: int
    parts: list[tuple[int, Any]] = field(default_factory=list)
    """(index of the first output token, float32 [tokens] on the device)."""


class LedgerError(AssertionError):
    """A transition that would lose a sample or count it twice."""


@dataclass(eq=False, slots=True)
class Sample:
    """One response being generated for one prompt."""

    group: "Group"
    index: int
    seed: int
    state: State = State.QUEUED
    length: int = 0
    """Output tokens so far, over all legs."""
    spans: list[Span] = field(default_factory=list)
    order: int = -1
    """Position in admission order; kept over suspensions, so a resumed batch has its old order."""
    pages: Pages | None = None
    """KV of a suspended sample; None = tokens only."""
    prefix: Prefix | None = None
    """What its first tokens are stored under on the host; kept while it runs on the same KV."""
    kv_version: int = 0
    """Oldest policy version that wrote a page beneath this sample; meaningless without KV."""
    request: Any = None
    """The engine's request object (adapter's business)."""
    finish_step: int = -1
    admitted_round: int = -1
    recomputing: bool = False
    """In the engine's queue for a prefill of prompt and old tokens."""
    recompute_reason: Reason = ""
    """Why its KV was given up by choice, until its next token."""
    proximal: Proximal | None = None
    """From the last recompute that was asked for it."""
    recall: Chunk | None = None
    """After a restart, until it enters the engine again: its tokens as the journal has them."""
    recorded: int = 0
    """Output tokens that the journal has, or will have with the records put so far (`recorder.py`, all of these)."""
    recorded_proximal: int = -1
    """Version of the proximal logprobs that it has."""
    recorded_admission: bool = False
    recorded_begin: bool = False

    def move(self, to: State) -> None:
        if to not in _ALLOWED[self.state]:
            raise LedgerError(f"{self.group.id}[{self.index}]: {self.state.value} -> {to.value}")
        self.group.counts[self.state] -= 1
        self.group.counts[to] += 1
        self.group.run.running += (to is State.RUNNING) - (self.state is State.RUNNING)
        self.state = to

    def open_span(self, version: int, kv: Provenance) -> None:
        """From the next output token on: written under `version`, on KV of this provenance (S6: only changes count)."""
        if self.spans and self.spans[-1].start == self.length:
            self.spans.pop()
        if not (self.spans and self.spans[-1].version == version and self.spans[-1].kv == kv):
            self.spans.append(Span(self.length, self.length, version, kv))

    def closed_spans(self) -> list[Span]:
        """Spans with their ends set, the last one at `length`; empty ones left out."""
        ends = [*(s.start for s in self.spans[1:]), self.length]  # a sample that never entered the engine has no span
        return [Span(s.start, e, s.version, s.kv) for s, e in zip(self.spans, ends, strict=False) if e > s.start]

    @property
    def oldest_version(self) -> int | None:
        """Version of the first output token; None without tokens."""
        return self.spans[0].version if self.length else None


@dataclass(eq=False, slots=True)
class Group:
    """The `n` samples of one prompt."""

    run: "Run"
    prompt: Prompt
    params: bytes
    incarnation: int
    order: int
    """Position in arrival order over the server's life."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """Undelivered samples by index."""
    counts: dict[State, int] = field(default_factory=lambda: dict.fromkeys(State, 0))
    shelf: str = ""
    """Where admission finds its queued members: "new", "begun", or "" when it has none (`Ledger` keeps it)."""
    prefix: Prefix | None = None
    """Under which the prompt was last stored on the host."""
    leader: "Sample | None" = None
    """Whose prefill computes, or has computed, the prompt for the others (`prompts.py`)."""
    prompt_version: int = -1
    """Policy version under which the engine was last given the whole prompt's KV; -1 = none of it is known."""
    first_round: int = -1
    """Number of the round in which it got its first token; what runs ahead belongs to the next one. -1 = none yet."""
    engine_params: Any = None
    """Decoded sampling parameters, shared by the group (adapter's business)."""

    @property
    def id(self) -> str:
        return self.prompt.id

    @property
    def whole(self) -> bool:
        """Every undelivered sample has finished."""
        return self.counts[State.FINISHED] == len(self.samples)

    @property
    def accepted(self) -> bool | None:
        """The caller's verdict; None while there is none."""
        return self.run.verdicts.get(self)

    @property
    def begun(self) -> bool:
        """Some member has been admitted, or has finished."""
        return len(self.samples) < self.prompt.n or self.counts[State.QUEUED] < len(self.samples)

    @property
    def finish_step(self) -> int:
        return max(s.finish_step for s in self.samples.values())

    def oldest_version(self) -> int | None:
        """Version of the oldest output token of any undelivered sample, finished ones included (S4)."""
        versions = [v for s in self.samples.values() if (v := s.oldest_version) is not None]
        return min(versions, default=None)


class SuspendedSamples(dict[Sample, None]):
    """The suspended samples of a run: a set, and their old batch order, sorted anew only after somebody has joined."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: deque[Sample] | None = None

    def __setitem__(self, sample: Sample, value: None) -> None:
        super().__setitem__(sample, value)
        self._queue = None

    def in_order(self) -> Iterator[Sample]:
        """In admission order; whoever has left is passed over."""
        if self._queue is None:
            self._queue = deque(sorted(self, key=lambda s: s.order))
        while self._queue and self._queue[0] not in self:
            self._queue.popleft()
        return (s for s in self._queue if s in self)


@dataclass(eq=False, slots=True)
class Run:
    """One training run: the owner of its prompts and partials."""

    name: str
    groups: "OrderedDict[str, Group]" = field(default_factory=OrderedDict)
    """Undelivered groups by prompt id, in arrival order."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """How often each prompt id has been accepted so far."""
    rounds_opened: int = 0
    whole: int = 0
    """Undelivered groups whose members have all finished."""
    finished: int = 0
    """Undelivered finished samples."""
    running: int = 0
    """Samples in the engine."""
    kv: KvPolicy = "keep"
    """Of its latest round; between two rounds it says what is worth a copy."""
    max_staleness: int | None = None
    """Likewise."""
    verdicts: "dict[Group, bool]" = field(default_factory=dict)
    """Undelivered groups that the caller has judged (`count: accepted`)."""
    suspended: SuspendedSamples = field(default_factory=SuspendedSamples)
    begun: dict[Group, None] = field(default_factory=dict)
    """Groups already begun that have queued members."""
    new: list[Group] = field(default_factory=list)
    """Groups never begun, by arrival."""

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


def sample_seed(seed: int, prompt_id: str, incarnation: int, index: int) -> int:
    """63 bits that depend on nothing but these four (S5): not on leg, slot, rank, batch, engine or run."""
    text = f"{seed}\0{prompt_id}\0{incarnation}\0{index}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
