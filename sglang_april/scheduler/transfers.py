"""Step 5 of 9 (store): copies that have been ordered and whose end has not been broadcast yet (S9)."""

from collections.abc import Iterator
from typing import NamedTuple

from sglang_april.kv.kv_pages import Copy, Pages
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample


class Transfer(NamedTuple):
    """One transfer. The sample may have other pages, and the pages another copy, by the time it ends."""

    sample: Sample
    copy: Copy
    pages: Pages


class Transfers:
    """By order, in the order in which they were given: each rank carries them out in turn."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._moves: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def ordered(self, order: int, sample: Sample) -> None:
        """Between the sample's slots and its copy, or of its copy to another tier."""
        pages = sample.pages
        assert pages is not None
        assert pages.copy is not None
        self._moves[order] = Transfer(sample, pages.copy, pages)

    def ended(self, order: int) -> Transfer | None:
        """All ranks have carried it out, or nobody waits for it any more; None if it was no transfer, or is known."""
        return self._moves.pop(order, None)

    def orders(self) -> list[int]:
        return list(self._moves)

    def in_flight(self, *, leaving: bool) -> Iterator[Transfer]:
        """Those that hold slots, off the device or back to it."""
        for order, move in self._moves.items():
            pages = move.pages
            if pages.move == order and pages.leaving == leaving and pages.slots is not None:
                yield move

    def leaving_tokens(self, other_than: Sample | None = None) -> int:
        """Pool tokens that copies in flight will set free."""
        leaving = self.in_flight(leaving=True)
        return sum(self._c.engine.held_tokens(m.pages) for m in leaving if m.sample is not other_than)

    def next_leaving(self) -> Sample | None:
        """The partial whose slots a copy in flight sets free first."""
        return next((m.sample for m in self.in_flight(leaving=True)), None)

    def last_loading(self, other_than: Sample | None = None) -> Sample | None:
        loading = [m.sample for m in self.in_flight(leaving=False) if m.sample is not other_than]
        return loading[-1] if loading else None
