"""Decides which tier the pages of each partial are in, the same way on every rank.

Budgets change here when something is decided, in tokens and whole pages of the store. Each rank copies its own pages
(`kv/page_store.py`, behind `Engine`), in the order of the decisions. A broadcast message reports the end of a transfer
(`rank-determinism`): until then the slots of a copy stay held, and a sample that is being loaded joins no batch.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from sglang_april.api import messages
from sglang_april.kv.cost_model import why_not_store
from sglang_april.kv.kv_pages import CopyTier, KvState, Pages, StoredKv
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.eviction import EvictionQueue, copy_cost, eviction_priority, select_victims, stored_in
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tier_budget import TierBudget
from sglang_april.scheduler.transfers import IntegrityChecks, Transfers


class Tiers:
    def __init__(self, context: Context) -> None:
        self._c = context
        self.transfers = Transfers(context)
        self._budget = TierBudget(context)
        self.integrity = IntegrityChecks(context, self._budget)
        self.used = self._budget.used
        self.lost: Counter[str] = Counter()
        """Partials whose pages were discarded because a transfer failed, by run."""
        self.lost_total, self.last_failure = 0, ""
        self._queues = {
            "device": EvictionQueue(lambda pages: pages.tier == "device", context.must_finish),
            "host": EvictionQueue(stored_in("host"), context.must_finish),
            "disk": EvictionQueue(stored_in("disk"), context.must_finish),
        }

    # --- samples suspend and resume

    def add_suspended(self, samples: Iterable[Sample]) -> None:
        """Samples that have just been suspended, with their pages on the device."""
        for sample in samples:
            if sample.kv.pages is not None:
                self._queues["device"].push(sample)

    def changed_priority(self, sample: Sample) -> None:
        """A sample with KV begins or ceases to be parked."""
        pages = sample.kv.pages
        if pages is not None:
            pages.priority = None
            self._queues[pages.tier].push(sample)

    def prepare_resume(self, sample: Sample) -> None:
        """Discard the copy of a sample that resumes on its slots: the next token makes it incomplete."""
        pages = sample.kv.pages
        if pages is not None and pages.copy is not None:
            if pages.copy.prefix is not None:
                self._budget.keep_prefix(sample, pages.copy.prefix)
            self._discard_copy(pages)

    def release(self, sample: Sample) -> None:
        """Discard the sample's KV, also an ended leg's; only its tokens remain."""
        pages = sample.kv.pages
        if pages is not None:
            if pages.loading:
                self._cancel_load(pages)
            if pages.copy is not None:
                self._discard_copy(pages)
            self._c.engine.release(sample)
            if pages.state is not KvState.RELEASED:
                pages.change(KvState.RELEASED)
            if sample.state is State.RUNNING:  # a leg in the engine's queue, which is now prefilled as a whole
                sample.kv.begin(self._c.clock.version)
        self.drop_prefix(sample)
        self._c.ledger.unpark(sample)

    def drop_prefix(self, sample: Sample) -> None:
        """The sample no longer shares a stored prefix: its KV was discarded, or is complete in one place."""
        if sample.kv.prefix is not None:
            self._budget.drop_user(sample.kv.prefix)
            sample.kv.prefix = None

    def round_ended(self) -> None:
        """The round's mandatory samples may be evicted like others again."""
        for queue in self._queues.values():
            queue.reset_mandatory()

    # --- to lower tiers

    def next_victim_on_device(self, excluding: Collection[Sample] = ()) -> Sample | None:
        """The sample whose device pages are demoted next."""
        queue, skipped = self._queues["device"], []
        while (first := queue.first()) is not None and first in excluding:
            skipped.append(first)
            queue.pop()
        for sample in skipped:
            queue.push(sample)
        return first

    def remove_all_on_device(self) -> list[Sample]:
        """Remove from the eviction queue, and return in eviction order, all samples with slots not yet being copied."""
        return [*self.transfers.loading(), *iter(self._queues["device"].pop, None)]

    def demote(self, sample: Sample, to: messages.Tier = "auto") -> None:
        """Move device pages to the host, else to the disk, else discard them. A copy holds the slots until it ends."""
        pages = sample.kv.pages
        if pages is None or to == "device":
            return
        if to == "none":
            self._c.trace("none", [sample])
            self.release(sample)
            return
        match pages.state:
            case KvState.LOADING:
                self._c.trace("cancel load", [sample])
                self._cancel_load(pages)
                self._queues[pages.tier].push(sample)
            case KvState.DEVICE_WITH_COPY:
                self._c.trace("free slots", [sample])
                self._free_slots(pages)
                self._queues[pages.tier].push(sample)
            case KvState.DEVICE:
                self._copy_out(sample, pages, to)

    def _copy_out(self, sample: Sample, pages: Pages, to: messages.Tier) -> None:
        tier = self._choose_tier(sample, pages, to)
        if tier is None:
            self.demote(sample, "none")
            return
        self._c.trace(tier, [sample])
        prefix = self._budget.prefix_for(sample, pages) if tier == "host" else None
        if tier == "disk":
            self.drop_prefix(sample)
        copy = pages.copy = self._budget.new_copy(tier, pages.length - (prefix.length if prefix else 0), prefix)
        order = copy.number
        pages.change(KvState.COPYING_OUT, transfer=order)
        self.transfers.add(order, sample)
        self._queues[tier].push(sample)
        self._c.engine.copy_out(sample, order)

    def _choose_tier(self, sample: Sample, pages: Pages, to: messages.Tier) -> CopyTier | None:
        """The first tier with room where, under `kv: auto`, a copy pays off; a forced tier needs room only."""
        lower: tuple[CopyTier, ...] = ("disk",) if to == "disk" else ("host", "disk")
        for tier in lower:
            if (to != "auto" or self._copy_pays_off(tier, sample, pages)) and self._make_room(tier, sample, pages):
                return tier
        return None

    def _copy_pays_off(self, tier: CopyTier, sample: Sample, pages: Pages) -> bool:
        run, clock = sample.group.run, self._c.clock
        if run.kv != "auto" or not self._c.cap(tier):
            return True
        age = clock.version + clock.open - sample.kv.version  # an open push moves the version before any sample steps
        sample.recompute.reason = why_not_store(self._c.rates, tier, pages.length, age, run.max_staleness)
        return not sample.recompute.reason

    def _make_room(self, tier: CopyTier, newcomer: Sample, pages: Pages) -> bool:
        """Evict what the newcomer displaces; False, and nothing changes, if there is no room for it."""
        # If the victims are a stored prompt's last users, it is stored again; they free its room as well.
        stored = self._budget.tokens_on_host(newcomer, pages) if tier == "host" else 0
        need, cap = self._budget.round_up(pages.length - stored), self._c.cap(tier)
        short = self.used[tier] + need - cap
        if need > cap or short <= 0:
            return need <= cap
        mandatory = self._c.must_finish(newcomer)
        victims = select_victims(self._queues[tier], newcomer, mandatory=mandatory, freed=copy_cost, short=short)
        for sample in victims or ():
            self._evict(sample, tier)
        return victims is not None

    def _evict(self, sample: Sample, tier: CopyTier) -> None:
        pages = sample.kv.pages
        assert pages is not None
        assert pages.copy is not None
        if tier == "host" and self._copy_pays_off("disk", sample, pages) and self._make_room("disk", sample, pages):
            self._c.trace("spill", [sample])
            self._spill(sample, pages)
        else:
            self._c.trace("evict", [sample])
            self.release(sample)

    def _spill(self, sample: Sample, pages: Pages) -> None:
        """Move a copy from the host to the disk. Orders that follow can use its room on the host."""
        copy = pages.copy
        assert copy is not None
        self.used["host"] -= copy.cost
        copy.tier, copy.cost = "disk", self._budget.round_up(pages.length)
        self.used["disk"] += copy.cost
        order = self._budget.next_number()
        self.transfers.add(order, sample)
        self._c.engine.spill(sample, order)
        if copy.prefix is not None:
            self._budget.drop_user(copy.prefix)
            copy.prefix = None
        self.drop_prefix(sample)
        self._queues["disk"].push(sample)

    def free_slots_now(self, sample: Sample) -> None:
        """Wait for this rank's part of the copy and free the slots; every rank does so at the same point."""
        pages = sample.kv.pages
        if pages is not None and pages.state is KvState.COPYING_OUT and pages.transfer is not None:
            self._c.trace("wait for copy", [sample])
            self._c.engine.wait(pages.transfer)
            self._c.engine.free_pages(pages)
            pages.change(KvState.COPYING_OUT_SLOTS_FREED)

    def move_all_to_disk(self) -> None:
        """Copy KV on the device and the host to the disk, as far as it has room; the highest priority goes first.

        Copies are ordered and not waited for. A restart finds no KV of attached requests (`recover_kv`).
        """
        runs = (run for run in self._c.ledger.runs.values() if not run.attached)
        suspended = (s for run in runs for s in run.suspended if s.kv.pages is not None)
        for sample in sorted(suspended, key=lambda s: (self._c.must_finish(s), eviction_priority(s)), reverse=True):
            self.demote(sample, "disk")
            pages = sample.kv.pages
            on_host = pages is not None and pages.copy is not None and pages.copy.tier == "host"
            if pages is not None and on_host and self._make_room("disk", sample, pages):
                self._c.trace("spill", [sample])
                self._spill(sample, pages)

    # --- back to the device

    def load(self, sample: Sample) -> bool:
        """Begin to load pages into new slots; False, and nothing changes, if the pool has no room.

        SGLang sets nothing aside for the next chunk of a prompt or for the next decode, and fails without it.
        """
        pages, engine = sample.kv.pages, self._c.engine
        assert pages is not None
        if engine.mid_prefill() or pages.length > engine.tokens_free() - engine.tokens_for_next_decode():
            return False
        order = self._budget.next_number()
        if not engine.load(sample, order):
            return False
        self._c.trace("load", [sample])
        pages.change(KvState.LOADING, transfer=order)
        self.transfers.add(order, sample)
        return True

    def _cancel_load(self, pages: Pages) -> None:
        assert pages.transfer is not None
        self._c.engine.wait(pages.transfer)
        self.transfers.pop(pages.transfer)
        self._free_slots(pages)

    def _free_slots(self, pages: Pages) -> None:
        """A complete copy remains."""
        self._c.engine.free_pages(pages)
        pages.change(KvState.STORED)

    # --- ends of orders, broadcast by rank 0

    def orders_ended(self, moved: messages.Moved) -> None:
        for order in moved.done:
            self._order_done(order)
        for order, why in moved.failed.items():
            self._order_failed(order, why)

    def _order_done(self, order: int) -> None:
        transfer = self.transfers.pop(order)
        if transfer is None:
            self.integrity.end(order, "")
            return
        pages = transfer.pages
        if pages.transfer != order:
            return
        match pages.state:
            case KvState.LOADING:
                pages.change(KvState.DEVICE_WITH_COPY)
                transfer.sample.kv.loaded = True
                transfer.sample.kv.quantized |= self._c.engine.kv_pages != "full"
                self._queues["device"].push(transfer.sample)
            case KvState.COPYING_OUT:
                self._free_slots(pages)
            case _:
                pages.change(KvState.STORED)

    def _order_failed(self, order: int, why: str) -> None:
        """A copy that one rank could not write or verify is discarded on all ranks (`verified-pages`)."""
        transfer = self.transfers.pop(order)
        if transfer is None:
            self.integrity.end(order, why)
            return
        if transfer.sample.kv.pages is transfer.pages and transfer.pages.copy is transfer.copy:
            self.discard_unusable(transfer.sample, why)

    def discard_unusable(self, sample: Sample, why: str) -> None:
        """Stored KV cannot be used: warn, count, and let the sample recompute."""
        self._c.trace("lost", [sample])
        self.lost_total += 1
        self.last_failure = why
        self.lost[sample.group.run.name] += 1
        if rnd := self._c.active_round(sample):
            rnd.stats.warn(f"stored KV could not be used and is recomputed: {why}")
        self.release(sample)

    def recover_kv(self, sample: Sample, kv: StoredKv) -> None:
        """After a restart, every rank has a file with this KV: use it if the budget has room."""
        pages = sample.kv.pages = Pages(kv.length, 0, None, None, None, KvState.STORED)
        if not self._make_room("disk", sample, pages):
            sample.kv.pages = None
            return
        sample.kv.version = kv.version
        pages.copy = self._budget.new_copy("disk", kv.length, None)
        self._queues["disk"].push(sample)
        self._c.engine.recover_kv(sample)

    # --- copies

    def _discard_copy(self, pages: Pages) -> None:
        """Discard the copy. A rank carries out an order that still writes it before the one that discards it."""
        copy = pages.copy
        assert copy is not None
        copying = pages.state in (KvState.COPYING_OUT, KvState.COPYING_OUT_SLOTS_FREED)
        if copy.prefix is not None and copying and pages.transfer is not None:
            # This transfer may be reading the prefix, for other samples too, from slots that are written to next.
            self._c.engine.wait(pages.transfer)
        self.used[copy.tier] -= copy.cost
        if copy.prefix is not None:
            self._budget.drop_user(copy.prefix)
        self._c.engine.discard(copy.number)
        if pages.transfer is not None:
            self.transfers.pop(pages.transfer)
        pages.copy = None
        pages.change(KvState.DEVICE if pages.ready else KvState.RELEASED)
