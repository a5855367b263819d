"""Step 5 of 9 after a restart: which samples of the journal have their KV in files of the disk tier, on every rank.

Part of the start, not of a scheduling step: each rank looks for itself, and all of them act on what they say together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_april.kv.kv_pages import Found

Outcome = str | None
"""Empty: all of its KV is there. None: no file of just these tokens. Else why a file that is there cannot be used."""


class PageFiles(Protocol):
    """What `Disk` has for a search."""

    @property
    def epoch(self) -> str: ...

    def find(self, key: Any, wanted: Found) -> int: ...


@dataclass(slots=True)
class KvSearch:
    """One rank's search among the files of the journal's last server epoch."""

    files: PageFiles
    epoch: str
    bytes_read: int = 0

    def look(self, wanted: Sequence[tuple[Any, Found]]) -> list[Outcome]:
        """One outcome per sample; files of another epoch, or of another journal, are not even opened."""
        if not self.epoch or self.files.epoch != self.epoch:
            return [None] * len(wanted)
        return [self._find(key, found) for key, found in wanted]

    def _find(self, key: Any, wanted: Found) -> Outcome:
        try:
            size = self.files.find(key, wanted)
        except Exception as error:  # noqa: BLE001 - whatever it is: without the file the sample is recomputed
            return f"{type(error).__name__}: {error}"
        self.bytes_read += size
        return "" if size else None


def agreed(said: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """What all ranks together say: found on all, or else why not. `said[rank][i]` is of sample i."""
    return [_agreed(of_sample) for of_sample in zip(*said, strict=True)]


def _agreed(outcomes: Sequence[Outcome]) -> Outcome:
    faults = [f"rank {rank}: {why}" if len(outcomes) > 1 else why for rank, why in enumerate(outcomes) if why]
    return faults[0] if faults else None if None in outcomes else ""
