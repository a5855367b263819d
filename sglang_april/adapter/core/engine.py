"""Moves samples into and out of the queues and batches of SGLang's scheduler.

Follows what SGLang does when it merges a prefill into the running batch (`Scheduler.get_next_batch_to_run`)
and when it builds a decode batch from stored KV (`Scheduler._build_hisparse_decode_batch`).
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from april_kernels import seeded_sampling
from sglang_april.adapter.core.attached import answer_aborted, queue_attached, was_refused
from sglang_april.adapter.core.envelope import AprilOutput
from sglang_april.adapter.core.prompt_pages import PromptPages
from sglang_april.adapter.core.proximal import is_eligible
from sglang_april.adapter.core.request import build_request, result_of, versioned_key
from sglang_april.adapter.core.restore_request import chunk_of, make_request, restore_request, restore_tokens
from sglang_april.adapter.core.sample_output import SampleOutput, StreamedOutput
from sglang_april.adapter.core.steps import steps_of
from sglang_april.adapter.core.store_orders import StoreOrders
from sglang_april.adapter.shapes.installed import shape
from sglang_april.api.messages import Event, FinishedSample, encode
from sglang_april.config import AprilConfig
from sglang_april.kv.kv_pages import Pages
from sglang_april.recovery.journal_snapshot import Chunk
from sglang_april.scheduler.state import Group, Proximal, Sample


class SchedulerEngine(StoreOrders):
    """`sglang_april.scheduler.engine.Engine` for SGLang."""

    def __init__(self, scheduler: Scheduler, config: AprilConfig) -> None:
        super().__init__(scheduler, config)
        seeded_sampling.warm_up(scheduler.model_config.vocab_size, scheduler.device)
        self.prompts = PromptPages(scheduler)
        self.version = 0
        self.overlap: bool = scheduler.enable_overlap
        self.preempts: bool = scheduler.enable_priority_preemption
        self._keeps_experts: bool = shape.resolved(scheduler.server_args).enable_return_routed_experts
        self._creating: Sample | None = None
        """The sample whose request SGLang is creating."""

    # --- requests that SGLang creates for samples

    def adopt(self, req: Req) -> None:
        """After `Req.__init__`: add the policy version to its cache key, and link it to its sample if it has one.

        Samples are identified by object, never by `rid`, which any client may choose (`isolated-samples`).
        """
        req.april_base_key = req.extra_key
        req.extra_key = versioned_key(req.extra_key, self.version)
        req.april = sample = self._creating
        req.april_diverted = sample is not None and not sample.attached
        self._creating = None
        if sample is not None:
            sample.request, req.april_described = req, False
            output = StreamedOutput if sample.attached else SampleOutput
            req.april_output = output(req.logprob.top_logprobs_num)
            if sample.journal.snapshot is not None:
                restore_tokens(req, sample, sample.journal.snapshot)

    def send(self, event: Event) -> None:
        self._s.ipc_channels.send_to_tokenizer.send_output(AprilOutput(payload=encode(event)))

    # --- steps

    def settle(self) -> None:
        """Process the step in flight, merge the last prefill as the loop would, and remove finished requests."""
        s = self._s
        queue = getattr(s, "result_queue", None)
        while queue:
            batch, result = queue.popleft()
            s.process_batch_result(batch, result)
        last, s.last_batch = s.last_batch, None
        if last is not None and last is not s.running_batch and last.forward_mode.is_extend():
            shape.remove(last, [r for r in (s.chunked_req, last.chunked_req) if r is not None])
            if not last.is_empty():
                s.running_batch = _merged(s.running_batch, last)
        shape.forget_last_batch(s)
        s.april.progress(steps_of((req, 0) for req in s.running_batch.reqs))
        s.running_batch.filter_batch()
        s.running_batch.batch_is_full = False

    def forward_count(self) -> int:
        return self._s.forward_ct

    # --- samples

    def start(self, sample: Sample, *, proximal: bool) -> None:
        s = self._s
        if sample.request is None:
            self._create(sample)
            self.collect_proximal(sample, wanted=proximal)
            return
        req: Req = sample.request
        req.april_output.unpack(req)
        if sample.attached:
            queue_attached(s, req)
            return
        self.collect_proximal(sample, wanted=proximal)
        s._add_request_to_queue(req)

    def collect_proximal(self, sample: Sample, *, wanted: bool) -> None:
        req: Req | None = sample.request
        collects = wanted and sample.length > 0 and req is not None and is_eligible(req)
        sample.recompute.proximal = Proximal(self.version) if collects else None
        sample.journal.proximal_version = -1

    def _create(self, sample: Sample) -> None:
        """Let SGLang create a request and queue it, or refuse it."""
        self.create(sample, lambda: self._s.handle_generate_request(build_request(sample)))

    def create(self, sample: Sample, let_create: Callable[[], Any]) -> None:
        """Call `let_create`, and link the request that SGLang creates in it to the sample."""
        self._creating = sample
        try:
            let_create()
        finally:
            self._creating = None

    def shares_prompt(self, group: Group) -> bool:
        return self.prompts.shares(group)

    def follow(self, sample: Sample) -> bool:
        req = make_request(self._s, self._create, sample)
        if req is None:
            return False
        sample.kv.pages = self.prompts.find(req)
        if sample.kv.pages is None:
            self.forget(sample)
        return sample.kv.pages is not None

    def attach(self, samples: Sequence[Sample]) -> None:
        reqs = [x.request for x in samples]
        for req in reqs:
            req.april_output.unpack(req)
            req.time_stats.forward_entry_time = time.perf_counter()  # a prefill sets it otherwise
        pages = [x.kv.pages for x in samples if x.kv.pages is not None]
        batch = self.pages.build_decode_batch(reqs, pages, [self._is_private(x) for x in samples])
        for sample in samples:
            sample.kv.pages = None
        self._s.running_batch = _merged(self._s.running_batch, batch)

    def end_weight_session(self) -> None:
        shape.end_weight_session(self._s)

    def hand_over(self, sample: Sample) -> None:
        pages = sample.kv.pages
        assert pages is not None
        self.pages.hand_over(pages, sample.request)
        sample.request.skip_radix_cache_insert = self._is_private(sample)
        sample.kv.pages = None

    def _is_private(self, sample: Sample) -> bool:
        """Whether the radix tree must not get the sample's KV (`no-mixed-version-prefix`).

        SGLang keeps the experts that computed a token by the token's slot: loaded KV is in slots of other tokens.
        """
        kv = sample.kv
        return kv.version < self.version or kv.quantized or (kv.loaded and self._keeps_experts)

    def detach(self, samples: Sequence[Sample]) -> None:
        s = self._s
        mine = {x.request: x for x in samples if x.request is not None}
        s.waiting_queue = [r for r in s.waiting_queue if r not in mine]
        self._grammar_queue[:] = [r for r in self._grammar_queue if r not in mine]
        if s.chunked_req in mine:
            self._drop_chunked(s.chunked_req)
        batch = s.running_batch
        taken = [r for r in batch.reqs if r in mine and not r.finished()]
        for req in taken:
            mine[req].kv.pages = self.pages.detach(req)
        if taken:
            gone = set(taken)
            batch.filter_batch(keep_indices=[i for i, r in enumerate(batch.reqs) if r not in gone and not r.finished()])
        batch.batch_is_full = False
        for req, sample in mine.items():
            if not sample.attached and (not req.output_ids or sample.journal.snapshot is not None):
                self.forget(sample)
            else:
                req.is_retracted &= bool(req.output_ids)  # without a token, its next prefill is its first
                req.april_output.pack(req)
                req.time_stats.forward_entry_time = 0.0  # no timeout counts the time until the sample resumes

    def _drop_chunked(self, req: Req) -> None:
        s = self._s
        s.chunked_req = None
        if s._pending_chunked_abort_req is req:
            s._pending_chunked_abort_req = None
        self.pages.reset_request(req)

    def refused(self, sample: Sample) -> bool:
        return sample.request is not None and was_refused(sample.request)

    def has_described(self, sample: Sample) -> bool:
        return sample.request is not None and sample.request.april_described

    def answer_aborted(self, sample: Sample) -> None:
        answer_aborted(self._s, sample.request)

    def forget(self, sample: Sample) -> None:
        self.release(sample)
        sample.request = None

    def finished(self, sample: Sample, reason: dict[str, Any] | None) -> FinishedSample:
        result = result_of(sample, sample.request, reason)
        self.forget(sample)
        return result

    def answered(self, sample: Sample) -> FinishedSample | None:
        reason = sample.request.finished_reason if sample.request is not None else None
        aborted = reason is None or reason.to_json()["type"] == "abort"
        return None if aborted else result_of(sample, sample.request, None)

    def output_length(self, sample: Sample) -> int:
        return len(sample.request.output_ids) if sample.request is not None else sample.length

    def record(self, sample: Sample, start: int) -> Chunk:
        return chunk_of(sample, start)

    # --- after a restart

    def rebuild_request(self, sample: Sample) -> bool:
        return restore_request(self._s, self._create, sample)

    # --- pages

    def free_pages(self, pages: Pages) -> None:
        self.pages.free_slots(pages)
        self._clear_batch_full()

    def release(self, sample: Sample) -> None:
        if sample.kv.pages is not None:
            # A leg without tokens does not run on these pages, which are an earlier leg's.
            self.pages.free(sample.kv.pages, sample.request if sample.length else None)
            sample.kv.pages = None
            self._clear_batch_full()

    def _clear_batch_full(self) -> None:
        """SGLang keeps `batch_is_full` set until a running request ends; with none running, it would stay set."""
        self._s.running_batch.batch_is_full = False

    def held_tokens(self, pages: Pages) -> int:
        return self.pages.round_up(pages.length) - pages.protected if pages.slots is not None else 0

    # --- cache keys

    def renew_keys(self) -> None:
        for req in itertools.chain(self._s.waiting_queue, self._grammar_queue):
            if not shape.has_kv(req):
                self._renew(req)
        tree, allocator = self._s.tree_cache, self._s.token_to_kv_pool_allocator
        if shape.has_tree(tree):
            # Unlocked nodes belong to older versions now and would only slow down eviction in later steps.
            allocator.free_group_begin()
            tree.evict(EvictParams(num_tokens=tree.evictable_size()))
            allocator.free_group_end()

    def _renew(self, req: Req) -> None:
        req.extra_key = versioned_key(req.april_base_key, self.version)


def _merged(running: ScheduleBatch, joining: ScheduleBatch) -> ScheduleBatch:
    if running.is_empty():
        joining.batch_is_full = False
        return joining
    running.merge_batch(joining)
    return running
