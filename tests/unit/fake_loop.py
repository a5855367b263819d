"""A small scheduling loop with the structure of SGLang's, on which `fake_engine.py` runs the real controller.

It has a waiting queue, chunked prefills with priority over decodes, a running batch, retracts when a decode does not
fit and, in the overlap loop, one step in flight. Every slot of the KV pool records its token, position and policy
version, so the next forward detects a lost, shared or stale page. Output token t is a function of the seed and t.
"""

from collections.abc import Callable, Iterable

from sglang_april.api.messages import Provenance
from sglang_april.kv.kv_pages import Pages
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.state import Group, Sample, State
from tests.unit.fake_copies import Copies
from tests.unit.fake_request import Request, Row, token


class FakeLoop:
    controller: Controller
    copies: Copies

    def __init__(self, slots: int, pool: int, chunk: int, overlap: bool, queue_limit: int) -> None:
        self.slots, self.pool, self.chunk, self.overlap, self.queue_limit = slots, pool, chunk, overlap, queue_limit
        self.version = self.epoch = 0
        self.renewed_for: int | None = None
        """Version of the newest cache keys."""
        self.cells: list[tuple[str, int, int] | None] = [None] * pool
        """Per KV slot: the request of its token, the position, and the version that wrote it."""
        self.lossy: set[int] = set()
        """Slots whose KV was restored from int8 pages."""
        self.free = list(range(pool))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.chunked: Request | None = None
        self.last: list[Row] | None = None
        """The last prefill, until its rows join the running batch."""
        self.in_flight: list[Row] | None = None
        self.prompts: dict[Group, tuple[int, int]] = {}
        """Groups whose prompt KV is cached: the version and server epoch that wrote it."""
        self.followed = 0
        self.forwards = 0
        self.retracts = 0
        self.late_abort = False
        """In this step a retract, after `before_step`, met a full queue."""
        self.retract_next = False
        """SGLang's test switch: retract a request at the next decode."""
        self.released: list[str] = []
        self.flush_pending = False
        self.on_forward: Callable[[list[Row]], None] = lambda rows: None
        self.on_results: Callable[[list[Row], list[Request]], None] = lambda rows, grown: None
        self.on_retract: Callable[[Request], None] = lambda request: None

    # --- the loop

    def step(self) -> bool:
        """One iteration of the scheduler loop; returns whether a forward was launched."""
        self.late_abort = False
        if (moved := self.copies.end_of_step()) is not None:
            self.controller.observe(moved)
        self.check_pending_flush()
        self.controller.context.flushing = self.flush_pending
        self.controller.before_step()
        self.merge_last()
        prefill = None if self.controller.resume() else self._prefill()
        rows = prefill or self._decode()
        if rows:
            self.forwards += 1
            self.on_forward(rows)
        before, self.in_flight = self.in_flight, rows or None
        self.last = prefill
        if not self.overlap:
            before, self.in_flight = self.in_flight, None
        if before:
            self.process(before)
        return bool(rows)

    def merge_last(self) -> None:
        if self.last is not None:
            self.running += [
                r.request for r in self.last if r.request is not self.chunked and r.request.slots is not None
            ]
            self.last = None

    def _prefill(self) -> list[Row] | None:
        rows: list[Row] = []
        left, budget = self.chunk, self.prefill_budget()
        places = self.slots - len(self.running)
        while left > 0 and (self.chunked is not None or (self.waiting and places > 0)):
            request = self.chunked or self.waiting[0]
            if request is not self.chunked:
                if self.prefill_need(request) >= budget:
                    break
                self.waiting.pop(0)
                request.slots, request.drawn = self._prefix(request), len(request.output)
            places -= 1
            done, total = len(request.slots), request.prompt + len(request.output)
            count = min(left, total - done)
            self._write(request, done, count)
            left -= count
            budget -= count + request.rest
            self.chunked = request if done + count < total else None
            rows.append(Row(request, request.leg, count, None if self.chunked else self._draw(request)))
            if self.chunked:
                break
        return rows or None

    def _prefix(self, request: Request) -> list[int]:
        """The slots behind which a leg is prefilled: those of the previous leg, if they are in the pool."""
        sample = request.sample
        if sample is None or sample.kv.pages is None or sample.length:
            return []
        pages = sample.kv.pages
        slots = pages.slots[: self.prefix_tokens(request)] if pages.ready else None
        self.controller.launched(sample, on_kv=slots is not None)
        for position, slot in enumerate(slots or ()):
            _, known, version = self.cells[slot]
            assert known == position
            self.cells[slot] = request.name, position, version
        self.free += pages.slots[len(slots) :] if slots is not None else []
        return slots or []

    @staticmethod
    def prefix_tokens(request: Request) -> int:
        """How many of its tokens have KV already."""
        sample = request.sample
        pages = sample.kv.pages if sample is not None and not sample.length else None
        return min(pages.length, request.prompt - 1) if pages is not None and pages.ready else 0

    def prefill_need(self, request: Request) -> int:
        """Free tokens without which SGLang does not begin the prefill."""
        return request.prompt + len(request.output) + request.rest - self.prefix_tokens(request)

    def _decode(self) -> list[Row] | None:
        self.running = [r for r in self.running if r.reason is None]
        kept = sorted(self.running, key=lambda r: (-len(r.output), r.prompt))
        while self.running and (self.retract_next or len(self.running) > len(self.free)):
            if len(kept) == 1:
                assert len(self.free) > 0, f"{kept[0].name} alone does not fit: SGLang would abort it"
                break
            self._retract(kept.pop())
            self.retract_next = False
        self.retract_next = False
        for request in self.running:
            self._write(request, request.prompt + request.drawn - 1, 1)
        return [Row(r, r.leg, 0, self._draw(r)) for r in self.running] or None

    def _retract(self, request: Request) -> None:
        self.retracts += 1
        if not self.retract_next:
            self.on_retract(request)
        self.running.remove(request)
        self.free_slots_of(request)
        request.recomputed = bool(request.output)
        if request.sample is not None:
            self.controller.retracted(request.sample)
        self.queue(request)
        self.late_abort |= request.reason is not None

    def _write(self, request: Request, position: int, count: int) -> None:
        assert len(request.slots) == position, f"{request.name}: KV has a hole"
        for p, slot in enumerate(request.slots):
            assert self.cells[slot][:2] == (request.name, p), f"{request.name} has {self.cells[slot]} at {p}"
        for p in range(position, position + count):
            slot = self.free.pop()
            self.lossy.discard(slot)
            self.cells[slot] = (request.name, p, self.version)
            request.slots.append(slot)

    def _draw(self, request: Request) -> tuple[int, Provenance]:
        request.drawn += 1
        old = any(self.cells[slot][2] < self.version or slot in self.lossy for slot in request.slots)
        return self.version, "kept" if old else "recomputed" if request.recomputed else "fresh"

    def process(self, rows: list[Row]) -> None:
        grown: list[Request] = []
        for row in rows:
            request = row.request
            if row.leg != request.leg or request.reason is not None or row.drew is None:
                continue
            if row.prefilled and request.sample is not None:
                self.prompts[request.sample.group] = row.drew[0], self.epoch
            request.output.append(token(request.seed, len(request.output)))
            request.drawn_under.append(row.drew)
            request.epochs.append(self.epoch)
            grown.append(request)
            if request.abort_next:
                request.reason = {"type": "abort"}
            elif len(request.output) == request.length:
                request.reason = {"type": "stop"}
            if request.reason is not None:
                self._keep_kv(request)
                self.free_slots_of(request)
        self.on_results(rows, grown)
        everyone = not any(r.prefilled for r in rows) and self.controller.counts_all()
        self._count((r.request, r.prefilled) for r in rows if everyone or r.prefilled or r.request.reason is not None)

    def _count(self, rows: Iterable[tuple[Request, int]]) -> None:
        self.controller.progress(
            (request.sample, len(request.output), prefilled, request.reason is not None)
            for request, prefilled in rows
            if request.sample is not None
            and request.sample.state is State.RUNNING
            and request.sample.request is request
        )

    def _keep_kv(self, request: Request) -> None:
        """A leg that finishes keeps its KV; the overlap loop's step in flight computes that of its last token."""
        sample = request.sample
        if sample is not None and sample.group.leg is not None and self.controller.context.park_cap_tokens:
            length = min(request.prompt + len(request.output), len(request.slots))
            sample.kv.pages = Pages(length, 0, request.slots[:length], None, None)
            request.slots = request.slots[length:]

    def free_slots_of(self, request: Request) -> None:
        self.free += request.slots or []
        request.slots = None
        request.leg += 1

    def queue(self, request: Request) -> None:
        self.waiting.append(request)
        if len(self.waiting) > self.queue_limit and request.sample is not None:
            self.abort_waiting(request)

    # --- engine events from outside

    def add_foreign_request(self, name: str, seed: int, prompt: int, max_new: int) -> Request:
        """Queue a stock request."""
        request = Request(name, seed, prompt, max_new)
        self.waiting.append(request)
        return request

    def abort_waiting(self, request: Request) -> None:
        """Abort a request in the waiting queue."""
        self.waiting.remove(request)
        request.reason = {"type": "abort"}
        if request.sample is not None:
            self.controller.aborted(request.sample, request.reason)

    def fully_idle(self) -> bool:
        places = (self.running, self.waiting, self.in_flight, self.last)
        return self.chunked is None and not any(places)

    def flush(self, *, wait: bool = False) -> bool:
        """`flush_cache`: evacuate, then clear the pool."""
        self.controller.interrupt()
        if not self.fully_idle():
            self.flush_pending = self.flush_pending or wait
            return False
        self.controller.evacuate()
        self.cells, self.free = [None] * self.pool, list(range(self.pool))
        self.prompts.clear()
        return True

    def check_pending_flush(self) -> None:
        if self.flush_pending and self.fully_idle():
            self.flush()
            self.flush_pending = False

    def weight_call(self, *, ok: bool, whole: bool, flush: bool) -> None:
        """One of SGLang's weight calls, as the adapter's hook handles it."""
        self.controller.interrupt()
        refused = flush and not self.fully_idle()
        ok = ok and not refused and (not flush or self.flush())
        self.controller.weight_call_ended(ok, "failed", whole=whole, refused=refused)

    def release_memory(self) -> bool:
        self.controller.interrupt()
        if not self.flush():
            return False
        self.released = ["kv_cache"]
        return True

    def settle(self) -> None:
        """Process the step in flight."""
        rows, self.in_flight = self.in_flight, None
        if rows:
            self.process(rows)
        self.merge_last()
        self._count((r, 0) for r in self.running)
        self.running = [r for r in self.running if r.reason is None]

    def output_length(self, sample: Sample) -> int:
        return len(sample.request.output) if sample.request is not None else sample.length

    def prefill_budget(self) -> int:
        """Free tokens, less a seventh of what the running requests may still write (SGLang learns this ratio)."""
        return len(self.free) - sum(r.rest for r in self.running) // 7
