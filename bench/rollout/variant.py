"""What a variant is, and what a round returns: counted the same way for all of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.rollout.engine_client import EngineClient
from bench.rollout.workload import Stream


@dataclass(frozen=True)
class DeliveredGroup:
    """One delivered group, as the trainer gets it. Versions are numbers of the variant's own pushes."""

    id: str
    lengths: list[int]
    rejected: bool = False
    oldest_version: int | None = None
    """Version of its oldest token; None where SGLang does not tell."""
    off_policy: int | None = None
    """Tokens of an older version than the round's."""
    hybrid: int | None = None
    """Tokens of the round's version that were drawn on KV of an older one."""


@dataclass
class RoundResult:
    """One round: what it delivered, and what it cost."""

    version: int
    groups: list[DeliveredGroup]
    generated: int | None = None
    """Output tokens of this round, by the engine for ours, else those that the client got; None where requests stay in
    flight and the client cannot know."""
    wasted: int = 0
    """Tokens that were computed and will never be delivered."""
    carry: int | None = None
    """Output tokens computed and not yet delivered, at the end: of partials and of finished surplus."""
    reprefilled: int = 0
    after_end: int | None = 0
    """Tokens computed after the last needed group had finished; None where nothing ends."""
    decoded_at_end: int | None = None
    """The decode counter when the client knew that the quota was there, where that is how `after_end` is counted."""
    legs: int = 0
    """Prefills that ended in an output token: the decode counter does not see those tokens."""
    prolonged: bool = False
    """The staleness bound kept the round open beyond its quota."""
    bytes_by_tier: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Delivered tokens that are trained on."""
        return sum(sum(group.lengths) for group in self.groups if not group.rejected)


@dataclass(frozen=True)
class Plan:
    """The sizes of a cell: the same for every variant."""

    slots: int
    groups: int
    """The quota, in groups."""
    n: int
    filtered: bool = False
    """`dapo`: rejected groups do not count."""
    over_sampling: float = 2.0
    """Clients outside start this many times the groups that they need."""
    max_staleness: int | None = None
    """Staleness bound of the batch quota; client-side variants have none. A round waits for groups that reach it."""
    unit: str = "group"
    concurrency: int | str | None = None
    quota_mode: str = "first"

    @property
    def samples(self) -> int:
        """Samples of a quota."""
        return self.groups * self.n


class Variant(Protocol):
    """One way to run rounds on one engine."""

    name: str
    stream: Stream
    delivered: Counter[str]
    """How often each sample has been delivered, by ``prompt/index``; `drain` completes it."""
    held: int
    """Samples that were handed over and not delivered, after a round: by the engine's count for ours."""

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None: ...

    @property
    def handed_over(self) -> int:
        """Prompts taken from the stream."""

    async def push(self, checkpoint: Path) -> None:
        """Brings the next policy version."""

    async def round(self) -> RoundResult:
        """A round that delivers the quota."""

    async def drain(self) -> RoundResult:
        """Finishes and delivers all that is left."""

    async def rest(self) -> None:
        """Called when another variant is to run: nothing of this one may take a step until its next push."""


def lost(variant: Variant, n: int) -> tuple[int, int]:
    """After a round: samples that were handed over and are neither delivered nor held, and deliveries that came twice.
    After `drain` none is held."""
    delivered = len(variant.delivered)
    return variant.handed_over * n - delivered - variant.held, variant.delivered.total() - delivered


def versions(groups: Sequence[DeliveredGroup], version: int) -> dict[str, Any]:
    """Staleness histogram of delivered groups (versions -> groups), None where it is not known."""
    ages = Counter(version - group.oldest_version for group in groups if group.oldest_version is not None)
    return {str(age): count for age, count in sorted(ages.items())}
