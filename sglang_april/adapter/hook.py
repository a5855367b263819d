"""One row of a hook table (`core/hook_table.py`)."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["before", "after", "around"]


@dataclass(frozen=True)
class Hook:
    """A handler on one or more functions of SGLang."""

    kind: Kind
    handler: str
    """`module:function` in the package of the hook table; imported when it is first called."""
    paths: tuple[str, ...]
    """Dotted paths of the hooked functions."""
    why: str
    remove_when: str
    """The change in SGLang that makes this hook unnecessary."""
