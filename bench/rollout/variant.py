"""Interface of a variant, and the result of a round, counted the same way for all variants."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.rollout.engine_client import EngineClient
from bench.rollout.workload import Stream


@dataclass(frozen=True)
class DeliveredGroup:
    """A delivered group. Versions count the variant's pushes."""

    id: str
    lengths: list[int]
    rejected: bool = False
    oldest_version: int | None = None
    """Version of its oldest token; None where SGLang does not report it."""
    off_policy: int | None = None
    """Number of tokens of a version older than the round's."""
    hybrid: int | None = None
    """Number of tokens of the round's version that were drawn on KV of an older one."""


@dataclass
class RoundResult:
    """The groups that a round delivered, and its costs."""

    version: int
    groups: list[DeliveredGroup]
    generated: int | None = None
    """Output tokens of this round, from the engine (batch quota) or as the client received them; None where requests
    stay in flight."""
    wasted: int = 0
    """Computed tokens that will never be delivered."""
    carry: int | None = None
    """Output tokens of partials and finished surplus at the end of the round."""
    reprefilled: int | None = 0
    """Tokens that were prefilled before and are prefilled again; None where requests stay in flight."""
    after_end: int | None = 0
    """Tokens computed after the last needed group finished; None where generation never stops."""
    decoded_at_end: int | None = None
    """Decode counter at the moment the client saw the quota met, for variants that count `after_end` by it."""
    legs: int = 0
    """Prefills that drew an output token; the decode counter does not include those tokens."""
    prolonged: bool = False
    """Whether the staleness bound kept the round open beyond its quota."""
    bytes_by_tier: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of delivered tokens that are trained on."""
        return sum(sum(group.lengths) for group in self.groups if not group.rejected)


@dataclass(frozen=True)
class Plan:
    """Sizes of a cell, the same for every variant."""

    slots: int
    groups: int
    """The quota, in groups."""
    n: int
    filtered: bool = False
    """`dapo`: whether a filter rejects groups, which then do not count."""
    over_sampling: float = 2.0
    """Client-side variants start this many times the groups that they need."""
    max_staleness: int | None = None
    """Staleness bound in versions, for the batch quota only. A round waits for groups that reach it."""
    unit: str = "group"
    concurrency: int | str | None = None
    quota_mode: str = "first"

    @property
    def samples(self) -> int:
        """Number of samples in a quota."""
        return self.groups * self.n


class Variant(Protocol):
    """One way to run rounds on one engine."""

    name: str
    stream: Stream
    delivered: Counter[str]
    """How often each sample has been delivered, by ``prompt/index``; `drain` completes it."""

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None: ...

    @property
    def held(self) -> int:
        """Samples handed over and not delivered, after a round (the engine's count for the batch quota)."""

    @property
    def handed_over(self) -> int:
        """Prompts taken from the stream."""

    async def push(self, checkpoint: Path) -> None:
        """Push the next policy version."""

    async def round(self) -> RoundResult:
        """Run a round that delivers the quota."""

    async def drain(self) -> RoundResult:
        """Finish and deliver all remaining samples."""

    async def rest(self) -> None:
        """Called before another variant runs: no sample of this one may take a step until its next push."""


def lost(variant: Variant, n: int) -> tuple[int, int]:
    """After a round: the numbers of lost samples (neither delivered nor held) and of duplicate deliveries."""
    delivered = len(variant.delivered)
    return variant.handed_over * n - delivered - variant.held, variant.delivered.total() - delivered


def versions(groups: Sequence[DeliveredGroup], version: int) -> dict[str, Any]:
    """Staleness histogram of delivered groups (versions -> groups); None where versions are unknown."""
    ages = Counter(version - group.oldest_version for group in groups if group.oldest_version is not None)
    return {str(age): count for age, count in sorted(ages.items())}
