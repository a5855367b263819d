"""An in-memory `sglang_april.scheduler.engine.Engine` under the real controller: no SGLang, no tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.kv.kv_pages import Pages
from sglang_april.recovery.journal_snapshot import Chunk
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.decisions import Decisions
from sglang_april.scheduler.state import Group, Proximal, Sample, State
from sglang_april.scheduler.version_clock import UNNAMED, VersionClock
from tests.unit.fake_copies import Copies
from tests.unit.fake_pages import FakePages
from tests.unit.fake_request import Request, build, remember, sample_key, seed_of


class FakeEngine(FakePages):
    page_size = 1
    bytes_per_token = stored_bytes_per_token = 10
    preempts = False
    gpus: list[str] = []  # noqa: RUF012

    def __init__(
        self,
        *,
        slots: int = 8,
        pool: int = 300,
        chunk: int = 16,
        overlap: bool = False,
        host_cap: int = 1000,
        disk_cap: int = 0,
        copy_delay: int = 0,
        fail_every: int = 0,
        queue_limit: int = 10**6,
        shares: bool = False,
    ) -> None:
        super().__init__(slots, pool, chunk, overlap, queue_limit)
        self.first_start: dict[str, int] = {}
        """Number of each request's first start, by name."""
        self.starts = 0
        self.sessions_ended = 0
        self.shares = shares
        """Whether members of a group can start on the KV of its prompt, as with a radix tree of one-token pages."""
        self.ended: dict[tuple[str, str, int, int], Request] = {}
        """Requests of finished samples, for the checks."""
        self.on_event: Callable[[messages.Event], None] = lambda event: None
        self.copies = Copies(copy_delay, fail_every)
        self.copies.engine = self
        self.controller = Controller(Context(self, VersionClock(), host_cap, disk_cap, decisions=Decisions()))

    def send(self, event: messages.Event) -> None:
        self.on_event(event)

    # --- slots and memory

    def forward_count(self) -> int:
        return self.forwards

    def free_slots(self) -> int:
        queued = len(self.waiting) - self.foreign_waiting()
        joining = {r.request for r in self.last or ()} | ({self.chunked} if self.chunked else set())
        return self.slots - len(self.running) - len(joining) - queued

    def foreign_waiting(self) -> int:
        return sum(r.sample is None or r.sample.arriving for r in self.waiting)

    def idle(self) -> bool:
        return not self.running and not self.last and not self.waiting and self.chunked is None

    def row_slots(self) -> int:
        """Rows of the last prefill are taken before they join the running batch."""
        return self.slots - len(self.running) - len(self.last or ())

    def memory_released(self) -> list[str]:
        return self.released

    def mid_prefill(self) -> bool:
        return self.chunked is not None

    def pool_tokens(self) -> dict[str, int]:
        last = [r.request for r in self.last or () if r.request is not self.chunked]
        chunked = [self.chunked] if self.chunked else []
        running = sum(len(r.slots or ()) for r in [*self.running, *last, *chunked])
        return {"available": len(self.free), "evictable": 0, "protected": 0, "running": running, "total": self.pool}

    def tokens_free(self) -> int:
        return len(self.free)

    def tokens_for_next_decode(self) -> int:
        joining = [r.request for r in self.last or () if r.request is not self.chunked]
        return sum(r.reason is None for r in [*self.running, *joining])

    def most_for_next_decode(self) -> int:
        return len(self.running) + len(self.last or ())

    def first_waiting_need(self) -> int:
        first = self.waiting[0] if self.waiting else None
        return self.prefill_need(first) if first is not None else 0

    def first_waiting_on_kv(self) -> Sample | None:
        first = self.waiting[0] if self.waiting else None
        return first.sample if first is not None and self.prefix_tokens(first) else None

    def remaining_estimate(self, sample: Sample) -> int:
        if sample.request is None:
            return abs(msgspec.msgpack.decode(sample.group.params)) + 1
        return sample.request.rest + 1

    # --- samples

    def start(self, sample: Sample, *, proximal: bool) -> None:
        request: Request = sample.request or build(sample)
        if request.name not in self.first_start:
            self.first_start[request.name] = self.starts
            self.starts += 1
        request.recomputed = bool(request.output)
        self.queue(request)

    def collect_proximal(self, sample: Sample, *, wanted: bool) -> None:
        sample.recompute.proximal = Proximal(self.version) if wanted and sample.length else None

    def shares_prompt(self, group: Group) -> bool:
        return self.shares and group.prompt.n > 1 and len(group.prompt.input_ids) > 4

    def follow(self, sample: Sample) -> bool:
        """Copies the KV to slots of its own instead of sharing them; the difference is not observable."""
        tokens = len(sample.group.prompt.input_ids) // 4 - 1
        if self.prompts.get(sample.group) != (self.version, self.epoch) or len(self.free) < tokens:
            return False
        request = build(sample)
        if request.name not in self.first_start:
            self.first_start[request.name] = self.starts
            self.starts += 1
        slots = [self.free.pop() for _ in range(tokens)]
        for position, slot in enumerate(slots):
            self.cells[slot] = (request.name, position, self.version)
        sample.kv.pages = Pages(tokens, 0, slots, None, None)
        self.followed += 1
        return True

    def attach(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            request, pages = sample.request, sample.kv.pages
            assert pages.ready
            assert pages.length == request.prompt + len(request.output) - 1
            request.slots, request.drawn, sample.kv.pages = pages.slots, len(request.output), None
            self.running.append(request)
        assert len(self.running) <= self.slots

    def end_weight_session(self) -> None:
        self.sessions_ended += 1

    def hand_over(self, sample: Sample) -> None:
        sample.kv.pages = None

    def detach(self, samples: Sequence[Sample]) -> None:
        mine = {s.request: s for s in samples if s.request is not None}
        assert self.in_flight is None or not any(r.request in mine for r in self.in_flight), "a step is in flight"
        self.waiting = [r for r in self.waiting if r not in mine]
        if self.chunked in mine:
            self.free_slots_of(self.chunked)
            self.chunked = None
        for request in [r for r in self.running if r in mine and r.reason is None]:
            assert len(request.slots) == request.prompt + len(request.output) - 1
            mine[request].kv.pages = Pages(len(request.slots), 0, request.slots, None, None)
            request.slots = None
            self.running.remove(request)
        for request, sample in mine.items():
            if not request.output and not sample.attached:
                self.forget(sample)

    def forget(self, sample: Sample) -> None:
        if sample.kv.pages is not None:
            self.release(sample)
        sample.request = None

    def attach_request(self, run: str, rid: str, ids: Sequence[int], length: int, *names: str) -> Sample | None:
        """A request of SGLang's own routes that draws `length` tokens; `names`: its trajectory, and the group.

        One that the journal has continues, or is answered again.
        """
        attached = self.controller.attached
        if attached.refusal(run, *(*names, None, None)[:2]):
            attached.refused(rid)
            return None
        params = msgspec.msgpack.encode(-length)
        sample = attached.begin(run, rid, np.array(ids, "<i4").tobytes(), params, *names)
        request = sample.request = Request(rid, seed_of(rid), len(ids), length, ends_early=False, sample=sample)
        remember(request)
        request.recomputed = bool(request.output)
        self.queue(request)
        if sample.journal.answered is not None:
            self.controller.suspender.suspend_now([sample])
            request.reason = sample.journal.answered.finish_reason
            attached.end([sample])
        elif sample.state is State.RUNNING:
            attached.created(sample)
        return sample

    def abort_request(self, rid: str) -> None:
        """As a client's `/abort_request` does."""
        self.controller.attached.abort_named(lambda request: request.name == rid)

    def refused(self, sample: Sample) -> bool:
        return sample.request is not None and sample.request.refused

    def has_described(self, _sample: Sample) -> bool:
        return False

    def answer_aborted(self, sample: Sample) -> None:
        sample.request.reason = {"type": "abort"}

    def finished(self, sample: Sample, reason: dict[str, Any] | None) -> messages.FinishedSample:
        self.ended[sample_key(sample)] = sample.request
        result = self._result(sample, reason or sample.request.reason)
        self.forget(sample)
        return result

    @staticmethod
    def _result(sample: Sample, reason: dict[str, Any]) -> messages.FinishedSample:
        group, output = sample.group, sample.request.output
        return messages.FinishedSample(
            group.run.name,
            group.id,
            group.incarnation,
            sample.index,
            np.array(output, "<i4").tobytes(),
            np.full(len(output), -1, "<f4").tobytes(),
            sample.closed_spans(),
            reason,
            sample.seed,
        )

    def answered(self, sample: Sample) -> messages.FinishedSample | None:
        reason = sample.request.reason if sample.request is not None else None
        return None if reason is None or reason["type"] == "abort" else self._result(sample, reason)

    def record(self, sample: Sample, start: int) -> Chunk:
        tokens = sample.request.output[start:]
        assert start + len(tokens) == sample.length
        logprobs = np.full(len(tokens), -1, "<f4").tobytes()
        return Chunk(np.array(tokens, "<i4").tobytes(), logprobs, sample.closed_spans())

    def newest_first(self, samples: Sequence[Sample]) -> list[Sample]:
        return sorted(
            (s for s in samples if s.request is not None and s.request.slots), key=lambda s: -s.queue_position
        )

    def renew_keys(self) -> None:
        clock = self.controller.context.clock
        assert self.version == (UNNAMED if clock.lost else clock.version)
        self.renewed_for = self.version
