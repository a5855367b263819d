"""One row of the table of hooks."""

from dataclasses import dataclass
from typing import Literal

SOURCE = "https://github.com/sgl-project/sglang/blob/v0.5.17/python/sglang/srt/"


@dataclass(frozen=True)
class Hook:
    """One hook: `handler` is `module:function`, imported when it is first called."""

    path: str
    kind: Literal["before", "after", "around"]
    handler: str
    why: str
    upstream: str
    remove_when: str
