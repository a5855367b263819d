"""Step 5 of 9 (store): the KV pages of one suspended sample, and where they are."""

from dataclasses import dataclass
from typing import Any, Literal

Tier = Literal["device", "host"]


@dataclass(eq=False, slots=True)
class Pages:
    """KV of tokens [0, length) of a sample: pool slots, some the radix tree's (`device`), or a copy (`host`)."""

    length: int
    """Tokens."""
    protected: int
    """Leading tokens whose slots the radix tree owns; locked there for this sample (device tier only)."""
    slots: Any
    """int64 [length] pool slots in token order (device tier), else None."""
    node: Any
    """The locked radix tree node of the protected part (device tier), else None."""
    extra_key: str | None
    """Cache key under which the protected part stands; never changed while KV is held (S6)."""
    host: Any = None
    """The engine's portable copy (host tier), else None."""

    @property
    def tier(self) -> Tier:
        return "device" if self.slots is not None else "host"
