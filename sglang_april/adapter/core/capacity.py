"""Free slots and pool tokens, counted as SGLang's own admission counts them."""

import itertools
from collections.abc import Sequence

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, PrefillAdder
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.accounting import pool_tokens
from sglang_april.adapter.core.leg_prefix import leg_prefix, prefix_tokens
from sglang_april.adapter.core.prompt_pages import reserved_output_tokens
from sglang_april.adapter.shapes.installed import shape
from sglang_april.scheduler.state import Sample


class Capacity:
    """The read-only part of the engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler
        self.page_size: int = scheduler.token_to_kv_pool_allocator.page_size

    def free_slots(self) -> int:
        s = self._s
        joining = self._last_prefill_reqs()
        taken = len(s.running_batch.reqs) + len(joining) + (s.chunked_req is not None and s.chunked_req not in joining)
        april_waiting = sum(not _is_foreign(r) for r in itertools.chain(s.waiting_queue, self._grammar_queue))
        return s.get_num_allocatable_reqs(taken) - april_waiting

    def _last_prefill_reqs(self) -> list[Req]:
        """Requests of the last prefill, which join the running batch at the top of the next step."""
        last = self._s.last_batch
        if last is None or last is self._s.running_batch or not last.forward_mode.is_extend():
            return []
        return last.reqs

    def foreign_waiting(self) -> int:
        return sum(map(_is_foreign, self._s.waiting_queue))

    def idle(self) -> bool:
        s = self._s
        runs = self._last_prefill_reqs() or not s.running_batch.is_empty()
        return not runs and not s.waiting_queue and s.chunked_req is None

    def row_slots(self) -> int:
        return self._s.get_num_allocatable_reqs(len(self._s.running_batch.reqs))

    def memory_released(self) -> list[str]:
        tags = self._s.weight_updater.offload_tags
        return sorted(tags) if tags else []

    def mid_prefill(self) -> bool:
        return self._s.chunked_req is not None

    def pool_tokens(self) -> dict[str, int]:
        return pool_tokens(self._s)

    def tokens_free(self) -> int:
        return self._s.token_to_kv_pool_allocator.available_size() + self._s.tree_cache.evictable_size()

    def tokens_for_next_decode(self) -> int:
        s = self._s
        alive = [r for r in itertools.chain(s.running_batch.reqs, self._last_prefill_reqs()) if not r.finished()]
        pages = sum(shape.committed(r) % s.page_size == 0 for r in alive if r is not s.chunked_req)
        return (pages + shape.beam_rows(s, alive)) * int(s.page_size)

    def most_for_next_decode(self) -> int:
        s = self._s
        running, joining = s.running_batch.reqs, self._last_prefill_reqs()
        beams = shape.beam_rows(s, itertools.chain(running, joining))
        return (len(running) + len(joining) + beams) * int(s.page_size)

    def prefill_budget(self) -> int:
        s = self._s
        adder = PrefillAdder(
            s.page_size,
            s.tree_cache,
            s.token_to_kv_pool_allocator,
            s.running_batch,
            s.new_token_ratio_tracker.current,
            s.max_prefill_tokens,
            s.chunked_prefill_size,
            max_prefill_bs=0,
            max_running_requests=s.max_running_requests,
            prefill_max_requests=None,
        )
        return int(adder.rem_total_tokens)

    def first_waiting_need(self) -> int:
        if not self._s.waiting_queue:
            return 0
        req, drawn = self._s.waiting_queue[0], len(self._s.waiting_queue[0].output_ids)
        if (pages := leg_prefix(req, self.page_size)) is not None:
            rest = req.seqlen - prefix_tokens(pages, req, self.page_size)
            return int(rest + _reserved(req, drawn) + self.page_size)
        # Without a radix tree, SGLang sets all tokens aside that such a request may still draw.
        whole = req.sampling_params.ignore_eos and getattr(self._s.tree_cache, "disable", True)
        reserved = req.sampling_params.max_new_tokens - drawn if whole else _reserved(req, drawn)
        return int(req.seqlen + reserved + self.page_size)

    def first_waiting_on_kv(self) -> Sample | None:
        first = self._s.waiting_queue[0] if self._s.waiting_queue else None
        return first.april if first is not None and leg_prefix(first, self.page_size) is not None else None

    def remaining_estimate(self, sample: Sample) -> int:
        req = sample.request
        reserved = _reserved(req, sample.length) if req is not None else reserved_output_tokens(sample)
        return reserved + self.page_size

    def newest_first(self, samples: Sequence[Sample]) -> list[Sample]:
        return sorted(
            (x for x in samples if x.request is not None and shape.has_kv(x.request)), key=lambda x: -x.queue_position
        )

    @property
    def _grammar_queue(self) -> list[Req]:
        return self._s.grammar_manager.grammar_queue


def _is_foreign(req: Req) -> bool:
    """Whether no admission has queued the request, so that it shares slots with rounds (`fair-slots`)."""
    return req.april is None or req.april.arriving


def _reserved(req: Req, drawn: int) -> int:
    """Output tokens that SGLang's admission sets aside for a request (`PrefillAdder.add_one_req`).

    `drawn`: its tokens so far; those of a suspended request are not in its `output_ids`.
    """
    return min(max(req.sampling_params.max_new_tokens - drawn, 0), CLIP_MAX_NEW_TOKENS)
