"""Orders of the scheduler to this rank's page store (`scheduler/engine.py`, pages)."""

from collections.abc import Sequence

from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.accounting import AccountingError, check_accounting
from sglang_april.adapter.core.build_store import build_store, key_of, select_page_format, tier_budgets
from sglang_april.adapter.core.capacity import Capacity
from sglang_april.adapter.core.page_pool import PagePool
from sglang_april.adapter.core.rank0_broadcast import Rank0Broadcast
from sglang_april.adapter.core.rank_agreement import agree
from sglang_april.adapter.shapes.installed import shape
from sglang_april.config import AprilConfig
from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.state import Sample


class StoreOrders(Capacity):
    """This rank's page store, with budgets that all ranks agree on, and the orders to it."""

    def __init__(self, scheduler: Scheduler, config: AprilConfig) -> None:
        super().__init__(scheduler)
        self.pages = PagePool(scheduler)
        size = scheduler.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes()
        kv_bytes = sum(size) if isinstance(size, tuple) else size
        page_format, ranks = select_page_format(scheduler, config), shape.tp_size(scheduler)
        self.bytes_per_token = int(kv_bytes // (scheduler.max_total_num_tokens + self.page_size)) * ranks
        self.kv_pages = page_format.name
        self.stored_bytes_per_token = 4 * page_format.page_words // page_format.page_tokens * ranks
        local_ranks = ranks // shape.resolved(scheduler.server_args).nnodes
        budgets = tier_budgets(config, page_format, ranks, local_ranks)
        self.budgets, self.gpus = agree(scheduler, config, page_format, budgets)
        self.broadcast = Rank0Broadcast(scheduler)
        self.store = build_store(scheduler, config, page_format, self.budgets, self.broadcast)

    def copy_out(self, sample: Sample, order: int) -> None:
        pages = sample.kv.pages
        assert pages is not None
        copy = pages.copy
        assert copy is not None
        with self.pages.after_forward():
            if copy.tier == "disk":
                self.store.copy_to_disk(order, copy.number, pages.slots, key_of(sample), sample.kv.version)
            else:
                prefix = (copy.prefix.number, copy.prefix.length) if copy.prefix is not None else None
                self.store.copy_to_host(order, copy.number, pages.slots, prefix)

    def load(self, sample: Sample, order: int) -> bool:
        pages = sample.kv.pages
        assert pages is not None
        assert pages.copy is not None
        if not self.pages.alloc_slots(pages):
            return False
        with self.pages.after_forward():
            self.store.load(order, pages.copy.number, pages.slots)
        return True

    def spill(self, sample: Sample, order: int) -> None:
        pages = sample.kv.pages
        assert pages is not None
        assert pages.copy is not None
        self.store.spill(order, pages.copy.number, key_of(sample), pages.length, sample.kv.version)

    def verify(self, order: int, stored: Sequence[Pages]) -> None:
        try:
            check_accounting(self._s, stored)
        except AccountingError as error:
            self.broadcast.report(order, str(error))
        else:
            self.store.verify(order)

    def wait(self, order: int) -> None:
        self.store.wait(order)

    def cancel(self, order: int) -> None:
        self.store.cancel(order)

    def discard(self, number: int) -> None:
        self.store.discard(number)

    def recover_kv(self, sample: Sample) -> None:
        pages = sample.kv.pages
        assert pages is not None
        assert pages.copy is not None
        self.store.register_file(pages.copy.number, key_of(sample), pages.length)
