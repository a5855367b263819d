"""Moves the KV pages of a sample out of SGLang's pools and back.

Invariant when a sample is detached after `settle`: `kv_committed_len == seqlen - 1 ==` allocated tokens; the KV of the
last output token does not exist yet, the next decode step writes it.
"""

import contextlib
from collections.abc import Iterator

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_april.adapter.core.host_to_device import columns_to_device
from sglang_april.adapter.core.leg_prefix import prefix_tokens
from sglang_april.adapter.shapes.installed import shape
from sglang_april.kv.kv_pages import Pages


class PagePool:
    """Moves pages between requests and partials; `kv/page_store.py` copies them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._rows = scheduler.req_to_token_pool
        self.tree = scheduler.tree_cache
        self.page_size: int = self._allocator.page_size

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def hand_over(self, pages: Pages, req: Req) -> None:
        """A request has been given the pages as its prefix, which its prefill has locked as well."""
        if pages.node is not None:
            shape.unlock(self.tree, pages.node)
        if (used := max(prefix_tokens(pages, req, self.page_size), pages.protected)) < pages.length:
            self._allocator.free(pages.slots[used:])

    def detach(self, req: Req) -> Pages:
        """Pages of a running request; its request slot is freed, its prefix stays locked in the tree."""
        length = shape.committed(req)
        if not length == req.seqlen - 1 == shape.allocated(req):
            raise AssertionError(f"{req.rid}: KV {length}/{shape.allocated(req)} of {req.seqlen - 1} tokens")
        slots = self._rows.req_to_token[shape.row(req), :length].to(torch.int64, copy=True)
        pages = Pages(length, shape.protected(req), slots, shape.lock_of(req), req.extra_key)
        self._rows.free(req)
        shape.take_kv(req)
        return pages

    def park(self, req: Req) -> Pages:
        """Pages of a request that has finished; the radix tree gets them as well.

        In the overlap loop, the step in flight has computed the KV of its last token.
        """
        ids = req.origin_input_ids + req.output_ids_through_stop
        length, allocated = min(shape.committed(req), len(ids)), shape.allocated(req)
        # Copies: SGLang frees in groups, and a freed view of this row would change with it.
        slots = self._rows.req_to_token[shape.row(req), :allocated].to(torch.int64, copy=True)
        self._allocator.free(slots[self.round_up(length) :])
        slots = slots[:length]
        if not req.skip_radix_cache_insert and shape.has_tree(self.tree):
            slots = shape.insert(self.tree, req, ids[:length], slots)
        pages = Pages(length, shape.protected(req), slots, shape.lock_of(req), req.extra_key)
        self._rows.free(req)
        shape.take_kv(req)
        return pages

    def reset_request(self, req: Req) -> None:
        """Release the KV of a request in a batch and make it ready to be prefilled again."""
        shape.release_kv(req, self.tree)
        req.reset_for_retract()

    def free(self, pages: Pages, req: Req | None) -> None:
        """Release pages; `req` keeps its tokens, and is None if the sample has no request yet (after a restart)."""
        self.free_slots(pages)
        if req is not None:
            req.reset_for_retract()

    def free_slots(self, pages: Pages) -> None:
        if pages.slots is None:
            return
        self._allocator.free(pages.slots[pages.protected :])
        if pages.node is not None:
            shape.unlock(self.tree, pages.node)
        pages.slots, pages.node, pages.protected = None, None, 0

    def alloc_slots(self, pages: Pages) -> bool:
        """Allocate slots for all tokens of the pages; False if the pool has too few."""
        need = self.round_up(pages.length)
        evict_from_tree_cache(self.tree, need)
        slots = self._allocator.alloc(need)
        if slots is None:
            return False
        pages.slots = slots[: pages.length].to(torch.int64, copy=True)  # a view would keep the whole free list
        return True

    @contextlib.contextmanager
    def after_forward(self) -> Iterator[None]:
        """Copies ordered in this context start after the forward in flight, which may still write their slots.

        Their fence is recorded on the forward stream. The schedule stream does not wait, so that the next batch is
        prepared while the forward runs.
        """
        s = self._s
        if not s.enable_overlap or s.device == "cpu":
            yield
            return
        with s.forward_stream_ctx:
            s.forward_stream.wait_stream(s.schedule_stream)
            yield

    def build_decode_batch(self, reqs: list[Req], pages: list[Pages], private: list[bool]) -> ScheduleBatch:
        """A decode batch of resumed requests on their stored pages.

        Args:
            private: per request, whether the tree never gets its KV.
        """
        s = self._s
        s.req_to_token_pool.alloc(self._ready(reqs))
        for req, page, is_private in zip(reqs, pages, private, strict=True):
            # One write for all would need 30 bytes of index tensors per token, and takes five times as long on a CPU.
            self._rows.write((shape.row(req), slice(0, page.length)), page.slots)
            shape.give_kv(req, page, s.tree_cache)
            req.extra_key = page.extra_key
            req.skip_radix_cache_insert = is_private
        batch = ScheduleBatch.init_new(
            reqs,
            s.req_to_token_pool,
            s.token_to_kv_pool_allocator,
            s.tree_cache,
            s.model_config,
            s.enable_overlap,
            s.spec_algorithm,
        )
        _fill_decode_tensors(s, batch, [p.length for p in pages])
        return batch

    @staticmethod
    def _ready(reqs: list[Req]) -> list[Req]:
        for req in reqs:
            shape.forget_kv(req)
            req.is_retracted = False
        return reqs


def _fill_decode_tensors(s: Scheduler, batch: ScheduleBatch, lengths: list[int]) -> None:
    """What `prepare_for_decode` expects of a batch whose last step has been processed."""
    rows = [shape.row(r) for r in batch.reqs]
    last = [r.output_ids[-1] if r.output_ids else r.origin_input_ids[-1] for r in batch.reqs]
    batch.req_pool_indices, batch.seq_lens, last_tokens = columns_to_device([rows, lengths, last], batch.device)
    batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
    batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = sum(lengths)
    _relay(s, batch.req_pool_indices, last_tokens)
    batch.input_ids = None
    batch.multimodal_inputs = [r.multimodal_inputs for r in batch.reqs]
    batch.top_logprobs_nums = [r.logprob.top_logprobs_num for r in batch.reqs]
    batch.token_ids_logprobs = [r.logprob.token_ids_logprob for r in batch.reqs]
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, s.model_config.vocab_size)


def _relay(s: Scheduler, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """Make `tokens` the input of the next step of the request slots; both int64 [rows].

    In the overlap loop, the forward in flight relays its tokens when it ends, also for requests that have finished
    since. Such a request may have freed one of `slots`, so this write is queued behind that forward on its stream.
    """
    payload = RelayPayload(bonus_tokens=tokens)
    if not s.enable_overlap:
        s.future_map.stash(slots, payload)
        return
    with s.forward_stream_ctx:
        s.forward_stream.wait_stream(s.schedule_stream)
        s.future_map.stash(slots, payload)
    if tokens.device.type != "cpu":  # the allocator must not reuse their memory before that stream has read them
        slots.record_stream(s.forward_stream)
        tokens.record_stream(s.forward_stream)
