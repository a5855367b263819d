"""The KV pages of one suspended sample: where they are (`KvState`), and which transfer is in flight.

Every rank holds the same description. `scheduler/tiers.py` orders the transfers and changes the state.
"""

import enum
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Tier = Literal["device", "host", "disk"]
CopyTier = Literal["host", "disk"]


class KvState(enum.Enum):
    """Where the KV of a suspended sample is; a sample without KV has no `Pages`."""

    DEVICE = "device"
    """KV in pool slots only."""
    DEVICE_WITH_COPY = "device with copy"
    """Loaded back into pool slots; the copy that it was loaded from is still complete."""
    COPYING_OUT = "copying out"
    """KV in pool slots, which stay held and readable until all ranks have written their part of the copy."""
    COPYING_OUT_SLOTS_FREED = "copying out, slots freed"
    """The slots were needed at once. This rank has written its part; some other rank may still be writing."""
    STORED = "stored"
    """KV in a complete copy only, on the host or the disk. A copy that moves from the host to the disk counts as on
    disk as soon as the transfer is ordered: a later load of the copy waits for it."""
    LOADING = "loading"
    """KV in a complete copy, from which the pool slots are being filled."""
    RELEASED = "released"
    """Neither slots nor copy: only the sample's tokens are left."""

    __hash__ = object.__hash__  # by identity; `enum` hashes the name in Python code


_K = KvState
_ALLOWED: dict[KvState, frozenset[KvState]] = {
    _K.DEVICE: frozenset({_K.COPYING_OUT, _K.RELEASED}),
    _K.DEVICE_WITH_COPY: frozenset({_K.DEVICE, _K.STORED}),
    _K.COPYING_OUT: frozenset({_K.DEVICE, _K.COPYING_OUT_SLOTS_FREED, _K.STORED}),
    _K.COPYING_OUT_SLOTS_FREED: frozenset({_K.STORED, _K.LOADING, _K.RELEASED}),
    _K.STORED: frozenset({_K.LOADING, _K.RELEASED}),
    _K.LOADING: frozenset({_K.DEVICE_WITH_COPY, _K.STORED}),
    _K.RELEASED: frozenset(),
}
_ON_DEVICE = frozenset({_K.DEVICE, _K.DEVICE_WITH_COPY})
_READABLE = frozenset({_K.DEVICE, _K.DEVICE_WITH_COPY, _K.COPYING_OUT})
_IN_TRANSFER = frozenset({_K.COPYING_OUT, _K.COPYING_OUT_SLOTS_FREED, _K.LOADING})


class KvStateError(AssertionError):
    """A transition that would lose KV pages, or free slots that a transfer still uses."""


class StoredKv(NamedTuple):
    """KV of tokens [0, length), whose oldest page was written under `version`."""

    length: int
    version: int


@dataclass(eq=False, slots=True)
class Prefix:
    """KV of a prompt's leading tokens, stored once for all members of a group that share these pages."""

    number: int
    """Its name in every rank's page store."""
    length: int
    """Tokens; whole pages of the store."""
    node: Any
    """The lock on the pages in the radix tree; pages with another lock are another prefix."""
    users: int = 0
    """Copies that begin with it, and samples that run on KV loaded from it."""


@dataclass(eq=False, slots=True)
class Copy:
    """A copy of a sample's pages in a lower tier, the same on every rank."""

    number: int
    tier: CopyTier
    cost: int
    """Tokens of the tier's budget, in whole pages of the store, without the prefix."""
    prefix: Prefix | None = None
    """On the host, the stored prefix that the copy begins with; a copy on disk is complete in itself."""


@dataclass(eq=False, slots=True)
class Pages:
    """KV of tokens [0, length) of a sample: in pool slots (some owned by the radix tree), in a copy, or both."""

    length: int
    """Tokens."""
    protected: int
    """Leading tokens whose slots the radix tree owns; locked there for this sample."""
    slots: Any
    """int64 [length] pool slots in token order; None while no slots are held."""
    node: Any
    """The lock on the protected part in the radix tree, else None. Equal locks protect the same slots."""
    extra_key: str | None
    """Cache key of the protected part; never changed while KV is held (`no-mixed-version-prefix`)."""
    state: KvState = KvState.DEVICE
    copy: Copy | None = None
    transfer: int | None = None
    """Order number of the transfer between slots and copy, until its end is broadcast (`rank-determinism`)."""
    priority: int | None = None
    """`eviction.eviction_priority`, computed once."""

    def change(self, to: KvState, transfer: int | None = None) -> None:
        """Move to another state; `transfer` is the order number of one that starts.

        Raises:
            KvStateError: the transition is not in the table, or the state needs a transfer and none is given.
        """
        if to not in _ALLOWED[self.state]:
            raise KvStateError(f"KV pages: {self.state.value} -> {to.value}")
        if to not in _IN_TRANSFER:
            self.transfer = None
        elif transfer is not None:
            self.transfer = transfer
        elif self.transfer is None:
            raise KvStateError(f"KV pages: {to.value} without a transfer")
        self.state = to

    @property
    def tier(self) -> Tier:
        """The tier that reports and budgets count the pages under; during a load still the copy's."""
        return "device" if self.state in _ON_DEVICE or self.copy is None else self.copy.tier

    @property
    def ready(self) -> bool:
        """All KV is in its slots, so the sample can resume. Also while it is copied out: a copy only reads."""
        return self.state in _READABLE

    @property
    def loading(self) -> bool:
        return self.state is KvState.LOADING
