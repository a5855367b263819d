"""Orders to the page stores until their end is broadcast (`rank-determinism`): KV transfers and integrity checks."""

from collections.abc import Iterator
from typing import NamedTuple

from sglang_april.api import messages
from sglang_april.kv.kv_pages import Copy, KvState, Pages
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tier_budget import TierBudget


class Transfer(NamedTuple):
    """One transfer. When it ends, the sample may have other pages, and the pages another copy."""

    sample: Sample
    copy: Copy
    pages: Pages


class Transfers:
    """Transfers in flight by order number, in the sequence of the decisions (ranks carry loads out first)."""

    def __init__(self, context: Context) -> None:
        self._c = context
        self._transfers: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, order: int, sample: Sample) -> None:
        """A transfer between the sample's slots and its copy, or of its copy to another tier."""
        pages = sample.kv.pages
        assert pages is not None
        assert pages.copy is not None
        self._transfers[order] = Transfer(sample, pages.copy, pages)

    def pop(self, order: int) -> Transfer | None:
        """Remove a transfer that all ranks have carried out, or whose end no longer matters; None if unknown."""
        return self._transfers.pop(order, None)

    def orders(self) -> list[int]:
        return list(self._transfers)

    def _in_state(self, state: KvState) -> Iterator[Transfer]:
        for order, transfer in self._transfers.items():
            if transfer.pages.transfer == order and transfer.pages.state is state:
                yield transfer

    def tokens_being_freed(self, excluding: Sample | None = None) -> int:
        """Pool tokens that become free when the copies in flight complete."""
        copying = self._in_state(KvState.COPYING_OUT)
        return sum(self._c.engine.held_tokens(t.pages) for t in copying if t.sample is not excluding)

    def first_copying_out(self) -> Sample | None:
        """The sample whose slots become free first."""
        return next((t.sample for t in self._in_state(KvState.COPYING_OUT)), None)

    def loading(self) -> list[Sample]:
        return [t.sample for t in self._in_state(KvState.LOADING)]

    def last_loading(self, excluding: Sample | None = None) -> Sample | None:
        return next((s for s in reversed(self.loading()) if s is not excluding), None)


class IntegrityChecks:
    """`GET /april/check`: verify every stored page and recount the pool (`pool-accounting`).

    Every rank checks its own part outside the scheduler loop, when its page store has nothing else to do; the command
    is answered when all ranks have reported. One check runs at a time; commands that arrive meanwhile get its outcome.
    """

    def __init__(self, context: Context, budget: TierBudget) -> None:
        self._c = context
        self._budget = budget
        self._order: int | None = None
        """The check that is running."""
        self._waiting: list[int] = []
        """Sequence numbers of the commands that wait for it."""

    def begin(self, seq: int) -> None:
        self._waiting.append(seq)
        if self._order is not None:
            return
        order = self._order = self._budget.next_number()
        stored = (s.kv.pages for s in self._c.ledger.with_kv())
        self._c.engine.verify(order, [pages for pages in stored if pages is not None])

    def end(self, order: int, problem: str) -> None:
        """Answer the commands if the order is the check's; `problem` is empty if no rank found one."""
        if order != self._order:
            return
        waiting, self._waiting, self._order = self._waiting, [], None
        for seq in waiting:
            self._c.engine.send(messages.Answer(seq, data={"ok": not problem, "problem": problem}))
