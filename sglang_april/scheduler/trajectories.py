"""Trajectories: the requests of one agent's run, its legs, in order, and how each continues the ones before.

Pure, and replicated on every rank. The content of a leg goes to the HTTP process when it ends (`messages.LegEnded`);
here only the token ids stay, to find what the next leg continues. Terms are those of docs/trajectories.md.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sglang_april.api.ids import common_prefix
from sglang_april.api.messages import LegEnded, SavedTrajectory
from sglang_april.scheduler.state import Sample, State

if TYPE_CHECKING:
    from sglang_april.scheduler.trajectory_run import TrajectoryRun

MAX_BRANCHES = 32
"""Sequences of one trajectory that a leg is compared with, the last ones."""

Ids = np.ndarray
"""int32, one dimension."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of an ended leg with all that it continues."""

    ids: Ids
    legs: list[tuple[int, int]]
    """(leg, end of its part in `ids`), in order."""
    parked: Sample | None = None
    """The sample that holds its KV, if that was kept."""


@dataclass(eq=False, slots=True)
class Leg:
    """One request of a trajectory."""

    trajectory: "Trajectory"
    number: int
    rid: str
    prompt: Ids
    parent: int | None
    """The ended leg whose sequence its prompt begins with; None if there is none."""
    shared: int
    """How many tokens of that sequence its prompt begins with."""
    path: list[tuple[int, int]]
    """As `Sequence.legs`, for those `shared` tokens."""
    extends: Sequence | None
    """The sequence of which it continues every token."""
    mismatch: bool = False
    """It continues none, although one had ended."""
    loads: int = 0
    """How often the KV of an earlier leg was loaded for it."""
    overtaken: int = 0
    """Steps in which that KV found no memory while stock requests waited as well."""
    prefilled: int = 0
    """Tokens computed before its first output token."""


@dataclass(eq=False, slots=True)
class Trajectory:
    run: "TrajectoryRun"
    id: str
    group: str
    legs: int = 0
    """Legs so far; they are numbered in order of arrival."""
    pending: dict[Sample, Leg] = field(default_factory=dict)
    """Legs that have not ended."""
    sequences: list[Sequence] = field(default_factory=list)
    """One for each ended leg that no other continues."""
    mismatches: int = 0
    """Legs with a mismatch so far."""
    tokens: int = 0
    """Output tokens of ended legs."""
    oldest: int | None = None
    """Policy version of the first output token; None without tokens."""
    begun: bool = False
    """A leg has been admitted."""
    legs_ended: int = 0
    restored: set[str] = field(default_factory=set)
    """The `rid`s of legs that had ended when the server was restarted."""
    end_number: int = -1
    """Its place among the trajectories of the run that have ended."""
    result: bytes = b""
    """The caller's reward and metadata, if it is done."""

    @property
    def done(self) -> bool:
        return self in self.run.done

    def new_leg(self, rid: str, prompt: Ids) -> Leg:
        """The next leg, which continues the ended sequence with the longest common prefix, the latest of equal ones."""
        best, shared = None, 0
        for sequence in self.sequences:
            common = common_prefix(sequence.ids, prompt)
            if common and common >= shared:
                best, shared = sequence, common
        path = _prefix(best.legs, shared) if best is not None else []
        extends = best if best is not None and shared == len(best.ids) else None
        mismatch = bool(self.sequences) and extends is None
        self.mismatches += mismatch
        parent = path[-1][0] if path else None
        leg = Leg(self, self.legs, rid, prompt, parent, shared, path, extends, mismatch)
        self.legs += 1
        return leg

    def end_leg(self, leg: Leg, output: Ids) -> list[Sequence]:
        """End a leg that has drawn `output`; other legs may continue it. Returns sequences that none can continue."""
        ids = np.concatenate([leg.prompt, output])
        gone = [leg.extends] if leg.extends is not None and leg.extends in self.sequences else []
        self.sequences = [s for s in self.sequences if s not in gone]
        self.sequences.append(Sequence(ids, [*leg.path, (leg.number, len(ids))]))
        self.tokens += len(output)
        self.legs_ended += 1
        gone += self.sequences[:-MAX_BRANCHES]
        del self.sequences[:-MAX_BRANCHES]
        return gone

    def refuse_leg(self, leg: Leg, sample: Sample) -> None:
        """The engine has refused the request: it is no leg, except that it has used a number and the KV it claimed."""
        del self.pending[sample]
        self.mismatches -= leg.mismatch

    def restore_legs(self, legs: list[LegEnded]) -> None:
        """After a restart: add its ended legs, in the order in which they ended."""
        known: dict[int, Sequence] = {}
        for saved in legs:
            prompt, path, extends = np.frombuffer(saved.prompt_ids, "<i4"), [], None
            if saved.parent is not None:
                before = known[saved.parent]
                prompt = np.concatenate([before.ids[: saved.shared], prompt])
                path = _prefix(before.legs, saved.shared)
                extends = before if saved.shared == len(before.ids) else None
            leg = Leg(self, saved.number, saved.rid, prompt, saved.parent, saved.shared, path, extends, saved.mismatch)
            self.mismatches += leg.mismatch
            self.end_leg(leg, np.frombuffer(saved.result.output_ids, "<i4"))
            known[leg.number] = self.sequences[-1]
            self.legs = max(self.legs, leg.number + 1)
            self.restored.add(saved.rid)
            for span in saved.result.spans[:1]:
                self.first_token(span.version)
        self.begun = self.oldest is not None

    def take_parked(self) -> list[Sample]:
        """The samples that hold KV of its ended legs, which are no longer needed."""
        parked = [s.parked for s in self.sequences if s.parked is not None]
        for sequence in self.sequences:
            sequence.parked = None
        return parked

    def first_token(self, version: int) -> bool:
        """A leg draws its first token; returns whether that changes `oldest`."""
        before = self.oldest
        self.oldest = version if before is None else min(before, version)
        return self.oldest != before

    def saved(self) -> SavedTrajectory:
        """What the journal stores of it, its legs apart."""
        run = self.run
        outcome = run.ended.get(self.id)
        state: Literal["active", "done", "rejected", "left"]
        if outcome is None:
            state = "active"
        elif self.done:
            state = "done"
        else:
            state = "rejected" if self.id in run.rejected else "left"
        return SavedTrajectory(
            run.name, self.id, self.group, state, self.oldest, outcome or "", self.end_number, self.result
        )

    def staleness(self, version: int) -> int:
        """`version` minus that of its oldest token; 0 without tokens."""
        return 0 if self.oldest is None else version - self.oldest

    def report(self, version: int) -> dict[str, Any]:
        """The trajectory's state in replies and `GET /april/trajectories/{id}`."""
        states = {sample.state for sample in self.pending}
        state = "done" if self.done else "running" if State.RUNNING in states else "pending" if states else "parked"
        return {
            "id": self.id,
            "group": self.group,
            "state": state,
            "legs": self.legs,
            "mismatches": self.mismatches,
            "tokens": self.tokens + sum(sample.length for sample in self.pending),
            "staleness": self.staleness(version),
        }


def _prefix(legs: list[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The legs of the first `length` tokens, with those at their end that added none."""
    prefix: list[tuple[int, int]] = []
    for number, end in legs:
        if prefix and prefix[-1][1] == length < end:
            break
        prefix.append((number, min(end, length)))
    return prefix
