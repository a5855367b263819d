"""The records of trajectories: all legs of an agent's run, token by token (docs/trajectories.md).

The scheduler decides which trajectories there are, count and are delivered; this store follows its messages. Token ids
are int32 and logprobs float32, as raw little-endian bytes.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.api.ids import common_prefix
from sglang_april.api.requests import DoneBody

BYTES_PER_LEG = 1024
"""Estimated size of a leg without its tokens."""


@dataclass(eq=False, slots=True)
class TrajectoryRecord:
    """The content of one undelivered trajectory."""

    run: str
    id: str
    group: str
    legs: dict[int, messages.LegEnded] = field(default_factory=dict)
    """The ended legs by number."""
    ended: DoneBody | None = None
    """Reward and metadata from the `done` call."""
    ended_bytes: int = 0
    """Encoded size of `ended`."""

    @property
    def nbytes(self) -> int:
        """Estimated size in memory."""
        legs = self.legs.values()
        tokens = sum(3 * (len(x.prompt_ids) + 2 * len(x.result.output_ids)) + BYTES_PER_LEG for x in legs)
        return tokens + self.ended_bytes

    def fields(self, packed: bool) -> dict[str, Any]:
        """The record as replies contain it, with raw arrays if `packed`."""
        legs = [self.legs[number] for number in sorted(self.legs)]
        parents = {leg.parent for leg in legs if leg.parent is not None and self._extends(leg)}
        branches: list[Branch] = []
        for leg in legs:
            if leg.number not in parents:
                branches.append(self._branch(leg, branches))
        return {
            "id": self.id,
            "run": self.run,
            "group": self.group,
            "reward": self.ended.reward if self.ended is not None else None,
            "metadata": self.ended.metadata if self.ended is not None else None,
            "mismatches": sum(leg.mismatch for leg in legs),
            "legs": [_leg(leg, packed) for leg in legs],
            "branches": [branch.fields(packed) for branch in branches],
        }

    def _extends(self, leg: messages.LegEnded) -> bool:
        """Whether the leg continues its parent's whole sequence."""
        return leg.parent is not None and leg.shared == self._length(self.legs[leg.parent])

    @staticmethod
    def _length(leg: messages.LegEnded) -> int:
        return leg.shared + (len(leg.prompt_ids) + len(leg.result.output_ids)) // 4

    def _branch(self, leg: messages.LegEnded, before: "list[Branch]") -> "Branch":
        """The sequence that ends with this leg, from its ancestors' parts."""
        parts: list[tuple[messages.LegEnded, int]] = []
        end = self._length(leg)
        while True:
            parts.append((leg, end))
            if leg.parent is None:
                break
            end = min(end, leg.shared)
            leg = self.legs[leg.parent]
        branch = Branch([part.number for part, _ in reversed(parts)])
        for part, end in reversed(parts):
            branch.add(part, end)
        branch.shared = max((common_prefix(branch.ids, other.ids) for other in before), default=0)
        return branch


@dataclass(eq=False, slots=True)
class Branch:
    """A sequence of a trajectory from its beginning to a leg that no other continues."""

    legs: list[int]
    shared: int = 0
    """Number of its leading tokens that an earlier branch contains."""
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, "<i4"))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, "<f4"))
    drawn: list[list[int]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)

    def add(self, leg: messages.LegEnded, end: int) -> None:
        """Append the leg's own part of the sequence, up to position `end`."""
        prompt, output = np.frombuffer(leg.prompt_ids, "<i4"), np.frombuffer(leg.result.output_ids, "<i4")
        start = leg.shared + len(prompt)
        drawn = max(0, min(len(output), end - start))
        prompt = prompt[: end - leg.shared]
        logprobs = np.full(len(prompt) + drawn, np.nan, "<f4")
        known = np.frombuffer(leg.result.logprobs, "<f4")[:drawn]
        logprobs[len(prompt) : len(prompt) + len(known)] = known
        self.ids = np.concatenate([self.ids, prompt, output[:drawn]])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        if drawn:
            self.drawn.append([start, start + drawn])
        for span in leg.result.spans:
            if span.start < drawn:
                self.spans.append(_span(span, start, min(span.end, drawn)))

    def fields(self, packed: bool) -> dict[str, Any]:
        """The branch as the record contains it."""
        return {
            "legs": self.legs,
            "shared": self.shared,
            "ids": _plain(self.ids, packed),
            "drawn": self.drawn,
            "logprobs": _plain(self.logprobs, packed),
            "spans": self.spans,
        }


def _plain(values: np.ndarray, packed: bool) -> bytes | list[Any]:
    """msgspec encodes NaN as null in JSON."""
    return values.tobytes() if packed else values.tolist()


def _span(span: messages.Span, offset: int, end: int) -> dict[str, Any]:
    return {"start": offset + span.start, "end": offset + end, "version": span.version, "kv": span.kv}


def _leg(leg: messages.LegEnded, packed: bool) -> dict[str, Any]:
    result = leg.result
    prompt = leg.shared + len(leg.prompt_ids) // 4
    return {
        "leg": leg.number,
        "rid": leg.rid,
        "parent": leg.parent,
        "shared": leg.shared,
        "prompt_ids": _plain(np.frombuffer(leg.prompt_ids, "<i4"), packed),
        "output_ids": _plain(np.frombuffer(result.output_ids, "<i4"), packed),
        "logprobs": _plain(np.frombuffer(result.logprobs, "<f4"), packed),
        "spans": [_span(span, 0, span.end) for span in result.spans],
        "finish_reason": result.finish_reason,
        "reused": prompt - leg.prefilled,
        "prefilled": leg.prefilled,
    }


class TrajectoryRecords:
    """The records of undelivered trajectories, by run and id."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], TrajectoryRecord] = {}

    def add(self, leg: messages.LegEnded) -> None:
        """Add an ended leg. The first leg creates the record; any earlier record of this name was removed."""
        record = self.of(leg.run, leg.trajectory, leg.group)
        record.group = leg.group
        record.legs[leg.number] = leg

    def of(self, run: str, name: str, group: str = "") -> TrajectoryRecord:
        """The record of a trajectory, empty as long as no leg has ended."""
        return self._records.setdefault((run, name), TrajectoryRecord(run, name, group or name))

    def get(self, run: str, name: str) -> TrajectoryRecord | None:
        """The record, if some leg has ended."""
        return self._records.get((run, name))

    def done(self, run: str, name: str, group: str, ended: DoneBody, nbytes: int) -> None:
        """Store reward and metadata of a trajectory that is done now, `nbytes` encoded."""
        record = self.of(run, name, group)
        record.ended, record.ended_bytes = ended, nbytes

    def restore(self, saved: list[messages.SavedTrajectory]) -> None:
        """After a restart: add trajectories that the journal has."""
        for one in saved:
            record = self.of(one.run, one.id, one.group)
            record.legs = {leg.number: leg for leg in one.legs}
            if one.result:
                record.ended = msgspec.msgpack.decode(one.result, type=DoneBody)
                record.ended_bytes = len(one.result)

    def remove(self, run: str, names: list[str]) -> None:
        """Remove trajectories that the scheduler removed without delivery."""
        for name in names:
            self._records.pop((run, name), None)

    def take(self, run: str, names: list[str]) -> list[TrajectoryRecord]:
        """Remove and return the records that a reply contains."""
        return [self._records.pop((run, name), TrajectoryRecord(run, name, name)) for name in names]
