"""Step 5 of 9 (store): the KV pages of one suspended sample, and where they are."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Tier = Literal["device", "host", "disk"]
CopyTier = Literal["host", "disk"]


class Found(NamedTuple):
    """KV of tokens [0, length), whose oldest page was written under `version`."""

    length: int
    version: int


@dataclass(eq=False, slots=True)
class Prefix:
    """KV of a prompt's leading tokens, stored once for all members of a group that stand on the same pages."""

    number: int
    """Its name in every rank's store."""
    length: int
    """Tokens; whole pages of the store."""
    node: Any
    """The radix tree node that owned the pages; another node, another prefix."""
    users: int = 0


@dataclass(eq=False, slots=True)
class Copy:
    """A copy of a sample's pages outside of the device, the same on every rank."""

    number: int
    tier: CopyTier
    cost: int
    """Tokens of the tier's budget, in whole pages of the store; those of a prefix are counted with the prefix."""
    prefix: Prefix | None = None
    """On the host, what it begins with; a copy on disk is whole."""


@dataclass(eq=False, slots=True)
class Pages:
    """KV of tokens [0, length) of a sample: pool slots, some the radix tree's, or a copy, or both."""

    length: int
    """Tokens."""
    protected: int
    """Leading tokens whose slots the radix tree owns; locked there for this sample."""
    slots: Any
    """int64 [length] pool slots in token order, or None: none are held."""
    node: Any
    """The locked radix tree node of the protected part, else None."""
    extra_key: str | None
    """Cache key under which the protected part stands; never changed while KV is held (S6)."""
    copy: Copy | None = None
    move: int | None = None
    """Number of the transfer between slots and copy whose end has not been broadcast yet (S9)."""
    leaving: bool = False
    """That transfer, or the last, went from the slots to the copy."""
    worth: int | None = None
    """Who gives way before whom (`placement.worth`), once somebody has asked."""

    @property
    def tier(self) -> Tier:
        """Where the pages count as: while they are on their way in, still where they come from."""
        return "device" if self.copy is None or (self.slots is not None and self.move is None) else self.copy.tier

    @property
    def ready(self) -> bool:
        """All of it is in its slots. While it leaves, too: a copy only reads."""
        return self.slots is not None and (self.move is None or self.leaving)

    @property
    def loading(self) -> bool:
        return self.slots is not None and self.move is not None and not self.leaving
