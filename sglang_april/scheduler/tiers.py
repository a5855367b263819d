"""Step 5 of 9 (store), the deciding half: which tier a partial's pages are in, the same on every rank.

Budgets are counted here when something is decided, in tokens and whole pages of the store. The copying itself is each
rank's own business (`kv/page_store.py`, behind `Engine`), in the order in which it was decided here. Its end is a
message (S9): until then the slots of a copy stay held, and what is loaded joins no batch.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from sglang_april.api import messages
from sglang_april.kv.cost_model import why_not_store
from sglang_april.kv.kv_pages import CopyTier, Found, Pages
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.eviction import EvictionQueue, copy_cost, rests_in, select_victims
from sglang_april.scheduler.integrity import IntegrityChecks
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tier_budget import TierBudget
from sglang_april.scheduler.transfers import Transfers


class Tiers:
    def __init__(self, context: Context) -> None:
        self._c = context
        self.moves = Transfers(context)
        self._books = TierBudget(context)
        self.checks = IntegrityChecks(context, self._books)
        self.expected: list[Sample] = []
        """Have a slot and are being loaded, or have just been: they do not give way to what waits, or a sample and a
        prompt could push each other out for ever."""
        self.used = self._books.used
        self.lost: Counter[str] = Counter()
        """Partials whose pages had to be given up because a copy failed, by run."""
        self.lost_in_all, self.last_failure = 0, ""
        self._shelves = {
            "device": EvictionQueue(lambda pages: pages.tier == "device", context.must_finish),
            "host": EvictionQueue(rests_in("host"), context.must_finish),
            "disk": EvictionQueue(rests_in("disk"), context.must_finish),
        }

    # --- samples come and go

    def arrived(self, samples: Iterable[Sample]) -> None:
        """Suspended just now, with their pages on the device."""
        for sample in samples:
            if sample.pages is not None:
                self._shelves["device"].push(sample)

    def resumed(self, sample: Sample) -> None:
        """Its device pages go back to the engine; a copy of them is worth nothing from the next token on."""
        pages = sample.pages
        if pages is not None and pages.copy is not None:
            if pages.copy.prefix is not None:
                self._books.stand_on(sample, pages.copy.prefix)
            self._forget_copy(pages)

    def release(self, sample: Sample) -> None:
        """Only its tokens remain."""
        if sample.pages is not None:
            self._let_copy_go(sample)
            self._c.engine.release(sample)
        self.left(sample)

    def left(self, sample: Sample) -> None:
        """It stands on no stored prefix any more: its KV is gone, or whole in one place."""
        if sample.prefix is not None:
            self._books.put_down(sample.prefix)
            sample.prefix = None

    def round_ended(self) -> None:
        for shelf in self._shelves.values():
            shelf.bounds_changed()

    # --- to lower tiers

    def first_on_device(self, besides: Collection[Sample] = ()) -> Sample | None:
        """The partial whose device pages give way first, `besides` some."""
        shelf, passed = self._shelves["device"], []
        while (first := shelf.first()) is not None and first in besides:
            passed.append(first)
            shelf.pop()
        for sample in passed:
            shelf.push(sample)
        return first

    def all_on_device(self) -> list[Sample]:
        """Whoever holds slots and is not leaving, in the order in which they give way. They have left the shelf."""
        loading = [m.sample for m in self.moves.in_flight(leaving=False)]
        return [*loading, *iter(self._shelves["device"].pop, None)]

    def demote(self, sample: Sample, to: messages.Tier = "auto") -> None:
        """Device pages go to the host, else to the disk, else only tokens remain. Slots stay held while they leave."""
        pages = sample.pages
        if pages is None or to == "device":
            return
        if to == "none":
            self._c.trace("none", [sample])
            self.release(sample)
        elif pages.loading:
            self._stop_loading(pages)
            self._shelves[pages.tier].push(sample)
        elif pages.slots is None or pages.move is not None:
            return
        elif pages.copy is not None:
            self._c.engine.free_pages(pages)
            self._shelves[pages.tier].push(sample)
        else:
            self._copy_out(sample, pages, to)

    def _copy_out(self, sample: Sample, pages: Pages, to: messages.Tier) -> None:
        tier = self._place(sample, pages, to)
        if tier is None:
            self.demote(sample, "none")
            return
        self._c.trace(tier, [sample])
        prefix = self._books.prefix_for(sample, pages) if tier == "host" else None
        if tier == "disk":
            self.left(sample)
        pages.copy = self._books.copy(tier, pages.length - (prefix.length if prefix else 0), prefix)
        pages.move, pages.leaving = pages.copy.number, True
        self.moves.ordered(pages.move, sample)
        self._shelves[tier].push(sample)
        self._c.engine.copy_out(sample, pages.move)

    def _place(self, sample: Sample, pages: Pages, to: messages.Tier) -> CopyTier | None:
        """The first tier that has room and, under `kv: auto`, is worth the copy; one that a round forces always is."""
        below: tuple[CopyTier, ...] = ("disk",) if to == "disk" else ("host", "disk")
        for tier in below:
            if (to != "auto" or self._is_worth(tier, sample, pages)) and self._make_room(tier, sample, pages):
                return tier
        return None

    def _is_worth(self, tier: CopyTier, sample: Sample, pages: Pages) -> bool:
        run, clock = sample.group.run, self._c.clock
        if run.kv != "auto" or not self._c.cap(tier):
            return True
        age = clock.version + clock.open - sample.kv_version  # an open push moves the version before any sample steps
        sample.recompute_reason = why_not_store(self._c.rates, tier, pages.length, age, run.max_staleness)
        return not sample.recompute_reason

    def _make_room(self, tier: CopyTier, newcomer: Sample, pages: Pages) -> bool:
        need, cap = self._books.round_up(pages.length), self._c.cap(tier)
        if need > cap:
            return False
        short = self.used[tier] + need - cap
        if short <= 0:
            return True
        mandatory = self._c.must_finish(newcomer)
        leaving = select_victims(self._shelves[tier], newcomer, mandatory=mandatory, gain=copy_cost, short=short)
        for sample in leaving or ():
            self._evict(sample, tier)
        return leaving is not None

    def _evict(self, sample: Sample, tier: CopyTier) -> None:
        pages = sample.pages
        assert pages is not None
        assert pages.copy is not None
        if tier == "host" and self._is_worth("disk", sample, pages) and self._make_room("disk", sample, pages):
            self._c.trace("spill", [sample])
            self._spill(sample, pages)
        else:
            self._c.trace("evict", [sample])
            self.release(sample)

    def _spill(self, sample: Sample, pages: Pages) -> None:
        """Host to disk. Its room on the host is free for orders that come after this one."""
        copy = pages.copy
        assert copy is not None
        self.used["host"] -= copy.cost
        copy.tier, copy.cost = "disk", self._books.round_up(pages.length)
        self.used["disk"] += copy.cost
        order = self._books.number()
        self.moves.ordered(order, sample)
        self._c.engine.spill(sample, order)
        if copy.prefix is not None:
            self._books.put_down(copy.prefix)
            copy.prefix = None
        self.left(sample)
        self._shelves["disk"].push(sample)

    def free_now(self, sample: Sample) -> None:
        """Wait for this rank's part of the copy, and free the slots. Every rank does so in the same place."""
        pages = sample.pages
        if pages is not None and pages.slots is not None and pages.leaving and pages.move is not None:
            self._c.engine.wait(pages.move)
            self._c.engine.free_pages(pages)

    # --- back to the device

    def load(self, sample: Sample) -> bool:
        """Begin to load pages into new slots; False when there is no room (nothing changed)."""
        pages = sample.pages
        assert pages is not None
        order = self._books.number()
        if not self._c.engine.load(sample, order):
            return False
        self._c.trace("load", [sample])
        pages.move, pages.leaving = order, False
        self.moves.ordered(order, sample)
        return True

    def _stop_loading(self, pages: Pages) -> None:
        assert pages.move is not None
        self._c.engine.wait(pages.move)
        self.moves.ended(pages.move)
        self._c.engine.free_pages(pages)
        pages.move = None

    # --- what the ranks have observed

    def moved(self, fact: messages.Moved) -> None:
        for order in fact.done:
            self._done(order)
        for order, why in fact.failed.items():
            self._failed(order, why)

    def _done(self, order: int) -> None:
        move = self.moves.ended(order)
        if move is None:
            self.checks.answer(order, "")
            return
        pages = move.pages
        if pages.move != order:
            return
        pages.move = None
        if pages.leaving:
            if pages.slots is not None:
                self._c.engine.free_pages(pages)
        else:
            self._shelves["device"].push(move.sample)

    def _failed(self, order: int, why: str) -> None:
        """A copy that one rank could not make, or not verify, is worth nothing on any: its tokens remain."""
        move = self.moves.ended(order)
        if move is None:
            self.checks.answer(order, why)
            return
        if move.sample.pages is move.pages and move.pages.copy is move.copy:
            self.lose(move.sample, why)

    def lose(self, sample: Sample, why: str) -> None:
        """Its stored KV cannot be used: told, counted, and recomputed."""
        self._c.trace("lost", [sample])
        self.lost_in_all += 1
        self.last_failure = why
        self.lost[sample.group.run.name] += 1
        if rnd := self._c.active_round(sample):
            rnd.stats.warn(f"stored KV could not be used and is recomputed: {why}")
        self.release(sample)

    def regained(self, sample: Sample, kv: Found) -> None:
        """After a restart: a file of every rank has its KV. It is taken over if the budget has room for it."""
        pages = sample.pages = Pages(kv.length, 0, None, None, None)
        if not self._make_room("disk", sample, pages):
            sample.pages = None
            return
        sample.kv_version = kv.version
        pages.copy = self._books.copy("disk", kv.length, None)
        self._shelves["disk"].push(sample)
        self._c.engine.regain(sample)

    def report(self) -> dict[str, Any]:
        """For `/april/state`: tokens by tier against the budgets, and what went wrong."""
        return {
            "used_tokens": dict(self.used),
            "cap_tokens": {"host": self._c.host_cap_tokens, "disk": self._c.disk_cap_tokens},
            "page_tokens": self._c.store_page,
            "in_flight": len(self.moves),
            "lost": self.lost_in_all,
            "last_failure": self.last_failure,
        }

    # --- copies given up

    def _let_copy_go(self, sample: Sample) -> None:
        pages = sample.pages
        if pages is None or pages.copy is None:
            return
        if pages.loading:
            self._stop_loading(pages)
        self._forget_copy(pages)

    def _forget_copy(self, pages: Pages) -> None:
        """The copy is given up; an order that still writes it is carried out before the one that discards it."""
        copy = pages.copy
        assert copy is not None
        if copy.prefix is not None and pages.move is not None and pages.leaving:
            # This very order may be reading the prefix, for others too, from slots that somebody writes to next.
            self._c.engine.wait(pages.move)
        self.used[copy.tier] -= copy.cost
        if copy.prefix is not None:
            self._books.put_down(copy.prefix)
        self._c.engine.discard(copy.number)
        if pages.move is not None:
            self.moves.ended(pages.move)
        pages.copy = pages.move = None
