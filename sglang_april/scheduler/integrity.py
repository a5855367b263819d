"""Integrity on demand (`GET /april/state?check=1`): all that is stored, and the accounts of the pool (S10)."""

from sglang_april.api import messages
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.tier_budget import TierBudget


class IntegrityChecks:
    """Every rank checks its own part beside the scheduler's loop; the message is answered when all have (S9)."""

    def __init__(self, context: Context, books: TierBudget) -> None:
        self._c = context
        self._books = books
        self._asked: dict[int, int] = {}
        """Messages by the order that will answer them."""

    def begin(self, seq: int) -> None:
        order = self._books.number()
        self._asked[order] = seq
        runs = self._c.ledger.runs.values()
        self._c.engine.verify(order, [s.pages for run in runs for s in run.suspended if s.pages is not None])

    def answer(self, order: int, problem: str) -> None:
        """If the order was a check's: what all ranks have found."""
        seq = self._asked.pop(order, None)
        if seq is not None:
            self._c.engine.send(messages.Answer(seq, data={"ok": not problem, "problem": problem}))
