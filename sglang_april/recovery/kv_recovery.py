"""After a restart, find the samples of the journal whose KV is in files of the disk tier on every rank.

This is part of the start, not of a scheduling step: each rank searches its own files, and all act on the combined
outcomes (`verified-pages`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_april.kv.kv_pages import StoredKv

Outcome = str | None
"""Empty: the KV is complete. None: no file of exactly these tokens. Otherwise: why the existing file is unusable."""


class PageFiles(Protocol):
    """The interface of `DiskTier` that a search needs."""

    @property
    def epoch(self) -> str: ...

    def find(self, key: Any, wanted: StoredKv) -> int: ...


@dataclass(slots=True)
class KvSearch:
    """One rank's search among the files of the journal's last server epoch."""

    files: PageFiles
    epoch: str
    bytes_read: int = 0

    def find_all(self, wanted: Sequence[tuple[Any, StoredKv]]) -> list[Outcome]:
        """One outcome per sample. Files of another epoch or another journal are not opened."""
        if not self.epoch or self.files.epoch != self.epoch:
            return [None] * len(wanted)
        return [self._find(key, found) for key, found in wanted]

    def _find(self, key: Any, wanted: StoredKv) -> Outcome:
        try:
            size = self.files.find(key, wanted)
        except Exception as error:  # noqa: BLE001 - without the file the sample is recomputed
            return f"{type(error).__name__}: {error}"
        self.bytes_read += size
        return "" if size else None


def combine_outcomes(by_rank: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """One outcome per sample over all ranks, from `by_rank[rank][sample]`: found on all of them, or why not."""
    return [_combine(of_sample) for of_sample in zip(*by_rank, strict=True)]


def _combine(outcomes: Sequence[Outcome]) -> Outcome:
    faults = [f"rank {rank}: {why}" if len(outcomes) > 1 else why for rank, why in enumerate(outcomes) if why]
    return faults[0] if faults else None if None in outcomes else ""
