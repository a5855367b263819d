"""The part of the in-memory engine that moves pages; a page has one token."""

from collections.abc import Sequence

from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.state import Sample
from tests.unit.fake_copies import Copies
from tests.unit.fake_loop import FakeLoop
from tests.unit.fake_request import build, sample_key


class FakePages(FakeLoop):
    kv_pages = "full"
    copies: Copies

    def recover_kv(self, sample: Sample) -> None:
        self.copies.recover(sample.kv.pages.copy.number, sample_key(sample), sample.kv.pages.length)

    def rebuild_request(self, sample: Sample) -> bool:
        build(sample)
        return True

    def copy_out(self, sample: Sample, order: int) -> None:
        history = sample.request.history if sample.request is not None else []
        self.copies.put(order, sample.kv.pages, sample_key(sample), sample.kv.version, history)

    def load(self, sample: Sample, order: int) -> bool:
        pages = sample.kv.pages
        if len(self.free) < pages.length:
            return False
        pages.slots = [self.free.pop() for _ in range(pages.length)]
        for slot in pages.slots:
            self.cells[slot] = None
            (self.lossy.discard if self.kv_pages == "full" else self.lossy.add)(slot)
        self.copies.get(order, pages)
        return True

    def spill(self, sample: Sample, order: int) -> None:
        self.copies.spill(order, sample.kv.pages)

    def verify(self, order: int, stored: Sequence[Pages]) -> None:
        assert all(pages.slots is not None or pages.copy is not None for pages in stored)
        self.copies.report(order)

    def wait(self, order: int) -> None:
        self.copies.carry_out(order)

    def cancel(self, order: int) -> None:
        self.copies.cancel(order)

    def free_pages(self, pages: Pages) -> None:
        assert not pages.loading or self.copies.has_ended(pages.transfer), "slots that a load still writes to"
        if pages.slots is not None:
            self.free += pages.slots
            pages.slots = None

    def discard(self, number: int) -> None:
        self.copies.discard(number)

    def release(self, sample: Sample) -> None:
        if sample.kv.pages is not None:
            self.free_pages(sample.kv.pages)
            sample.kv.pages = None

    def held_tokens(self, pages: Pages) -> int:
        return len(pages.slots) if pages.slots is not None else 0
