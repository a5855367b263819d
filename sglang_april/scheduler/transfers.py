"""Orders to the page stores until their end is broadcast (`rank-determinism`): KV transfers and integrity checks."""

from collections.abc import Iterator
from typing import NamedTuple

from sglang_april.api import messages
from sglang_april.kv.kv_pages import Copy, CopyTier, KvState, Pages
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tier_budget import TierBudget


class Transfer(NamedTuple):
    """One transfer. When it ends, the sample may have other pages, and the pages another copy."""

    sample: Sample
    copy: Copy
    pages: Pages


class Transfers:
    """Gives the orders, and has those in flight by number, in the sequence of the decisions (ranks carry loads out
    first). `Tiers` has found room for what a copy takes.
    """

    def __init__(self, context: Context, budget: TierBudget) -> None:
        self._c, self._budget = context, budget
        self._transfers: dict[int, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    # --- orders

    def copy_out(self, sample: Sample, tier: CopyTier) -> None:
        """Begin to copy device pages to a tier."""
        pages = sample.kv.pages
        assert pages is not None
        prefix = self._budget.prefix_for(sample, pages) if tier == "host" else None
        if tier == "disk":
            self._budget.drop_prefix(sample)
        copy = pages.copy = self._budget.new_copy(tier, pages.length - (prefix.length if prefix else 0), prefix)
        pages.change(KvState.COPYING_OUT, transfer=copy.number)
        self._transfers[copy.number] = Transfer(sample, copy, pages)
        self._c.engine.copy_out(sample, copy.number)

    def spill(self, sample: Sample) -> None:
        """Begin to move a copy from the host to the disk. Orders that follow can use its room on the host."""
        pages, used = sample.kv.pages, self._budget.used
        assert pages is not None
        copy = pages.copy
        assert copy is not None
        used["host"] -= copy.cost
        copy.tier, copy.cost = "disk", self._budget.round_up(pages.length)
        used["disk"] += copy.cost
        order = self._budget.next_number()
        self._transfers[order] = Transfer(sample, copy, pages)
        self._c.engine.spill(sample, order)
        if copy.prefix is not None:
            self._budget.drop_user(copy.prefix)
            copy.prefix = None
        self._budget.drop_prefix(sample)

    def load(self, sample: Sample) -> bool:
        """Begin to load a copy into new slots; False, and nothing changes, if the pool has too few."""
        pages, order = sample.kv.pages, self._budget.next_number()
        assert pages is not None
        assert pages.copy is not None
        if not self._c.engine.load(sample, order):
            return False
        pages.change(KvState.LOADING, transfer=order)
        self._transfers[order] = Transfer(sample, pages.copy, pages)
        return True

    def cancel_load(self, pages: Pages) -> None:
        self._cancel(pages)
        self.free_slots(pages)

    def free_slots(self, pages: Pages) -> None:
        """A complete copy remains."""
        self._c.engine.free_pages(pages)
        pages.change(KvState.STORED)

    def discard_copy(self, pages: Pages) -> None:
        """Discard the copy, also one that is being made or moved."""
        copy = pages.copy
        assert copy is not None
        self._cancel(pages)
        self._budget.used[copy.tier] -= copy.cost
        if copy.prefix is not None:
            self._budget.drop_user(copy.prefix)
        self._c.engine.discard(copy.number)
        pages.copy = None
        pages.change(KvState.DEVICE if pages.ready else KvState.RELEASED)

    def _cancel(self, pages: Pages) -> None:
        """End the transfer between slots and copy, if there is one: other samples may use its slots from now on."""
        if pages.transfer is not None:
            self._c.engine.cancel(pages.transfer)
            self.pop(pages.transfer)

    # --- orders in flight

    def pop(self, order: int) -> Transfer | None:
        """Remove a transfer that all ranks have carried out, or whose end no longer matters; None if unknown."""
        return self._transfers.pop(order, None)

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
