"""Decides which tier the pages of each partial are in, the same way on every rank.

Budgets change here when something is decided, in tokens and whole pages of the store. Each rank copies its own pages
(`kv/page_store.py`, behind `Engine`), in the order of the decisions. A broadcast message reports the end of a transfer
(`rank-determinism`): until then the slots of a copy stay held, and a sample that is being loaded joins no batch.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from sglang_april.api import messages
from sglang_april.kv.cost_model import why_not_store
from sglang_april.kv.kv_pages import CopyTier, KvState, Pages, StoredKv, Tier
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.eviction import EvictionQueue, copy_cost, eviction_priority, movable_in, select_victims
from sglang_april.scheduler.parked_kv import ParkedKv
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tier_budget import TierBudget
from sglang_april.scheduler.transfers import IntegrityChecks, Transfers


class Tiers:
    def __init__(self, context: Context) -> None:
        self._c = context
        self._budget = TierBudget(context)
        self.transfers = Transfers(context, self._budget)
        self.integrity = IntegrityChecks(context, self._budget)
        self.used = self._budget.used
        self.parked = ParkedKv()
        self.lost: Counter[str] = Counter()
        """Partials whose pages were discarded because a transfer failed, by run."""
        self.lost_total, self.last_failure = 0, ""
        self._queues: dict[Tier, EvictionQueue] = {
            tier: EvictionQueue(movable_in(tier), context.must_finish) for tier in ("device", "host", "disk")
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
        if pages is None:
            return
        if sample.state is State.PARKED:
            self.parked.add(sample)
        else:
            self.parked.remove(sample)
        pages.priority = None
        self._queues[pages.tier].push(sample)

    def limit_parked(self) -> None:
        """Release the KV that was parked first, beyond `--april-park-gb`."""
        while self.parked.tokens > self._c.park_cap_tokens:
            sample = self.parked.first()
            self._c.trace("release parked", [sample])
            self.release(sample)

    def prepare_resume(self, sample: Sample) -> None:
        """Discard the copy of a sample that resumes on its slots: the next token makes it incomplete."""
        pages = sample.kv.pages
        if pages is not None and pages.copy is not None:
            if pages.copy.prefix is not None:
                self._budget.keep_prefix(sample, pages.copy.prefix)
            self.transfers.discard_copy(pages)

    def release(self, sample: Sample) -> None:
        """Discard the sample's KV, also an ended leg's; only its tokens remain."""
        pages = sample.kv.pages
        if pages is not None:
            if pages.loading:
                self.transfers.cancel_load(pages)
            if pages.copy is not None:
                self.transfers.discard_copy(pages)
            self._c.engine.release(sample)
            if pages.state is not KvState.RELEASED:
                pages.change(KvState.RELEASED)
            if sample.state is State.RUNNING:  # a leg in the engine's queue, which is now prefilled as a whole
                sample.kv.begin(self._c.clock.version)
        self.drop_prefix(sample)
        self.parked.remove(sample)
        self._c.ledger.unpark(sample)

    def drop_prefix(self, sample: Sample) -> None:
        """The sample no longer shares a stored prefix: its KV was discarded, or is complete in one place."""
        self._budget.drop_prefix(sample)

    def round_ended(self) -> None:
        """The round's mandatory samples may be evicted like others again."""
        for queue in self._queues.values():
            queue.reset_mandatory()

    # --- to lower tiers

    def next_victim_on_device(self, excluding: Collection[Sample] = ()) -> Sample | None:
        """The sample whose device pages are demoted next."""
        return self._queues["device"].first(excluding)

    def remove_all_on_device(self) -> list[Sample]:
        """Remove from the eviction queue, and return in eviction order, all samples with slots not yet being copied."""
        return [*self.transfers.loading(), *iter(self._queues["device"].pop, None)]

    def highest_first(self, samples: Iterable[Sample]) -> list[Sample]:
        """Those with pages, in reverse eviction order: demoted in this order, none is evicted by one that follows."""
        with_pages = (s for s in samples if s.kv.pages is not None)
        return sorted(with_pages, key=lambda s: (self._c.must_finish(s), eviction_priority(s)), reverse=True)

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
                self.transfers.cancel_load(pages)
                self._queues[pages.tier].push(sample)
            case KvState.DEVICE_WITH_COPY:
                self._c.trace("free slots", [sample])
                self.transfers.free_slots(pages)
                self._queues[pages.tier].push(sample)
            case KvState.DEVICE:
                self._copy_out(sample, pages, to)

    def _copy_out(self, sample: Sample, pages: Pages, to: messages.Tier) -> None:
        tier = self._choose_tier(sample, pages, to)
        if tier is None:
            self.demote(sample, "none")
            return
        self._c.trace(tier, [sample])
        self.transfers.copy_out(sample, tier)
        self._queues[tier].push(sample)

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
            self._spill(sample)
        else:
            self._c.trace("evict", [sample])
            self.release(sample)

    def _spill(self, sample: Sample) -> None:
        """Move a copy from the host to the disk."""
        self._c.trace("spill", [sample])
        self.transfers.spill(sample)
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
        suspended = (s for run in runs for s in run.suspended)
        for sample in self.highest_first(suspended):
            self.demote(sample, "disk")
            pages = sample.kv.pages
            on_host = pages is not None and pages.copy is not None and pages.copy.tier == "host"
            if pages is not None and on_host and self._make_room("disk", sample, pages):
                self._spill(sample)

    # --- back to the device

    def load(self, sample: Sample) -> bool:
        """Begin to load pages into new slots; False, and nothing changes, if the pool has no room.

        SGLang sets nothing aside for the next chunk of a prompt or for the next decode, and fails without it.
        """
        pages, engine = sample.kv.pages, self._c.engine
        assert pages is not None
        if engine.mid_prefill() or pages.length > engine.tokens_free() - engine.tokens_for_next_decode():
            return False
        if not self.transfers.load(sample):
            return False
        self._c.trace("load", [sample])
        return True

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
                self.transfers.free_slots(pages)
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
        self.lost[sample.group.run.key] += 1
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
