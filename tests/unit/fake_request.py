"""The requests of `fake_loop.py`, and how those of samples are made."""

import zlib
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sglang_april.api.messages import Provenance
from sglang_april.scheduler.state import Sample
from tests.unit.fake_copies import SampleKey


def token(seed: int, position: int) -> int:
    return (seed >> (position % 40)) % 997


@dataclass(eq=False, slots=True)
class Request:
    """A request in the engine; `sample` is None for a stock request."""

    name: str
    seed: int
    prompt: int
    """Prompt tokens."""
    max_new: int
    ends_early: bool = True
    sample: Sample | None = None
    output: list[int] = field(default_factory=list)
    drawn_under: list[tuple[int, Provenance]] = field(default_factory=list)
    """Per output token: the version, and the provenance of its KV as read from the slots."""
    epochs: list[int] = field(default_factory=list)
    """Per output token: the server epoch in which it was drawn."""
    drawn: int = 0
    """Output tokens drawn on the device, including the step in flight."""
    slots: list[int] | None = None
    recomputed: bool = False
    leg: int = 0
    """Incremented when KV is lost; results of an earlier leg are ignored."""
    reason: dict[str, Any] | None = None
    abort_next: bool = False
    refused: bool = False
    """As in `Engine.refused`: it draws one token of another prompt."""

    @property
    def length(self) -> int:
        """Output tokens at which it stops."""
        return 1 + self.seed % self.max_new if self.ends_early else self.max_new

    @property
    def history(self) -> list[Any]:
        """Epoch, version and provenance per output token; requests equal in it have equal KV."""
        return list(zip(self.epochs, self.drawn_under, strict=True))

    @property
    def rest(self) -> int:
        return max(self.max_new - len(self.output), 0)


@dataclass(slots=True)
class Row:
    """The part of one forward that concerns one request."""

    request: Request
    leg: int
    prefilled: int
    drew: tuple[int, Provenance] | None


def build(sample: Sample) -> Request:
    """Build the request of a sample; a suspended sample restored from a journal gets its tokens."""
    group = sample.group
    prompt, size = len(group.prompt.input_ids) // 4, msgspec.msgpack.decode(group.params)
    name = f"{group.gid}.{sample.index}"
    request = sample.request = Request(name, sample.seed, prompt, abs(size), size > 0, sample)
    remember(request)
    return request


def remember(request: Request) -> None:
    """The tokens of a sample that was restored from a journal."""
    sample = request.sample
    if sample.journal.snapshot is not None:
        request.output = np.frombuffer(sample.journal.snapshot.output_ids, "<i4").tolist()
        request.drawn_under = [(s.version, s.kv) for s in sample.journal.snapshot.spans for _ in range(s.start, s.end)]
        request.epochs = [0] * len(request.output)
        sample.journal.snapshot = None


def seed_of(rid: str) -> int:
    """Of an attached request, whose tokens depend on its `rid` alone."""
    return zlib.crc32(rid.encode())


def sample_key(sample: Sample) -> SampleKey:
    return sample.group.run.name, sample.group.id, sample.group.incarnation, sample.index
