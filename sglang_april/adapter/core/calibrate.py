"""Measures the rates of `kv: auto` while the server starts: the model's prefills and the store's copies.

All ranks measure at the same time, before the first step, while the pool is empty. A collective call finds the slowest
rank, and rank 0 broadcasts the result (`rank-determinism`). Prefills run as in SGLang's `benchmark/one_batch.py`.
"""

import contextlib
import logging
import time
from array import array

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_april.adapter.core.request import NO_INPUT_LOGPROBS
from sglang_april.adapter.shapes.installed import shape
from sglang_april.api.messages import Rates
from sglang_april.kv.cost_model import fit_prefill, slowest_rank
from sglang_april.kv.kv_pages import CopyTier
from sglang_april.kv.page_store import PageStore

CHUNK = {"cpu": 256}
"""Tokens of one prefill at most; 2,048 keep a GPU busy."""
CHUNKS = 4
COPIED_BYTES = 16 << 20
REPEATS = 2
"""The fastest is used: the first prefill and the first copy to a tier include one-time set-up."""

log = logging.getLogger("sglang_april")


def measure(s: Scheduler, store: PageStore, budgets: dict[CopyTier, int], rank_bytes_per_token: int) -> Rates | None:
    """Measure on all ranks. Returns None, and logs why, if a single rank fails: `kv: auto` then keeps everything.

    Args:
        budgets: tokens that each tier may hold.
        rank_bytes_per_token: bytes of one token in this rank's part of the KV.

    Raises:
        Exception: this rank failed, of several. The others wait for it in a collective of the model, so that only the
            end of the server ends them.
    """
    ranks = shape.tp_size(s)
    try:
        found = _rates(s, store, budgets, rank_bytes_per_token)
    except Exception:
        if ranks > 1:
            raise
        log.exception("april: kv auto keeps everything, because its rates could not be measured")
        return None
    if ranks == 1:
        return found
    gathered: list[Rates] = [found] * ranks
    torch.distributed.all_gather_object(gathered, found, group=s.tp_cpu_group)
    return slowest_rank(gathered)


def _rates(s: Scheduler, store: PageStore, budgets: dict[CopyTier, int], size: int) -> Rates:
    times = [_prefills(s) for _ in range(REPEATS)]
    token_s, square_s = fit_prefill([(tokens, min(t[tokens] for t in times)) for tokens in times[0]])
    copied: dict[CopyTier, tuple[float, float]] = {}
    for tier, budget in budgets.items():
        tokens = min(budget, s.max_total_num_tokens, COPIED_BYTES // max(1, size))
        if not tokens:
            continue
        slots = torch.randperm(tokens, device=s.token_to_kv_pool_allocator.device) + 1
        try:
            trials = [store.benchmark_copy(tier, slots) for _ in range(REPEATS)]
        except (OSError, MemoryError) as error:
            log.warning("april: the %s tier could not be measured: %s", tier, error)
        else:
            copied[tier] = (min(out for out, _ in trials) / tokens, min(back for _, back in trials) / tokens)
    return Rates(token_s, square_s, copied)


@torch.no_grad()
def _prefills(s: Scheduler) -> dict[int, float]:
    """Tokens → seconds to prefill one sample up to this length, chunk by chunk as the scheduler would."""
    page, allocator = s.page_size, s.token_to_kv_pool_allocator
    chunk = min(s.chunked_prefill_size or s.max_prefill_tokens, CHUNK.get(s.device, 2048))
    capacity = min(s.max_total_num_tokens - 2 * page, s.model_config.context_len - 1)
    chunk = min(chunk, capacity) // page * page
    prefix = torch.empty(0, dtype=torch.int64, device=allocator.device)
    spent, after = 0.0, {}
    try:
        for _ in range(min(CHUNKS, capacity // chunk)):
            began = time.perf_counter()
            prefix = torch.cat([prefix, _prefill(s, prefix, chunk)])
            spent += time.perf_counter() - began
            after[len(prefix)] = spent
    finally:
        if len(prefix):
            allocator.free(prefix)
    return after


def _prefill(s: Scheduler, prefix: torch.Tensor, tokens: int) -> torch.Tensor:
    """One forward of the model over `tokens` after a prefix; returns their pool slots, int64 [tokens]."""
    ids = array("q", [1]) * (len(prefix) + tokens)
    req = Req("april.calibrate", "", ids, SamplingParams(max_new_tokens=1))
    req.full_untruncated_fill_ids, req.logprob_start_len = ids, NO_INPUT_LOGPROBS
    shape.extend_range(req, prefix, len(ids))
    batch = ScheduleBatch.init_new(
        [req],
        s.req_to_token_pool,
        s.token_to_kv_pool_allocator,
        s.tree_cache,
        s.model_config,
        enable_overlap=False,
        spec_algorithm=s.spec_algorithm,
    )
    batch.prepare_for_extend()
    try:
        batch.input_ids, batch.prefill_input_ids_cpu = batch.prefill_input_ids_cpu.to(batch.device), None
        runner = s.tp_worker.model_runner
        # On the stream of later forwards: memory that torch caches for activations belongs to the stream that used it.
        with s.forward_stream_ctx if s.enable_overlap else contextlib.nullcontext():
            s.forward_stream.wait_stream(torch.get_device_module(batch.device).current_stream())
            runner.forward(shape.forward_batch(batch, runner))
        torch.get_device_module(batch.device).synchronize()
    except BaseException:
        s.token_to_kv_pool_allocator.free(batch.out_cache_loc)
        raise
    finally:
        s.req_to_token_pool.free(req)
    return batch.out_cache_loc.to(torch.int64)
