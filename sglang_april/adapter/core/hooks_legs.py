"""Keeps a trajectory's KV between two legs, and prefills the next leg after it (docs/trajectories.md).

A leg that ends keeps its pages as a suspended sample does. The request of the next leg gets them as the prefix that
SGLang's radix tree would have found, so that SGLang prefills the other tokens only.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.core.attached import was_refused
from sglang_april.adapter.core.hooks_scheduler import Process
from sglang_april.adapter.core.leg_prefix import leg_prefix, prefix_tokens
from sglang_april.adapter.core.page_pool import PagePool
from sglang_april.adapter.shapes.installed import shape
from sglang_april.kv.kv_pages import Pages


def keep_kv(orig: Callable[..., None], req: Req, tree_cache: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND release_kv_cache: a leg that finishes keeps its KV for the next one."""
    sample = req.april
    if _parks(req) and shape.is_inserted(*args, **kwargs):
        sample.kv.pages = _page_pool().park(req)
    else:
        orig(req, tree_cache, *args, **kwargs)


def _parks(req: Req) -> bool:
    sample = req.april
    if sample is None or sample.group.leg is None or sample.request is not req or sample.kv.pages is not None:
        return False
    parks = Process.controller is not None and Process.controller.context.park_cap_tokens > 0
    return parks and req.finished() and not was_refused(req)


def use_kv(_: None, req: Req, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Req.init_next_round_input: the pages of the earlier leg are the prefix."""
    req.april_prefix = None
    if req.april is None:
        return
    pool = _page_pool()
    pages = req.april_prefix = leg_prefix(req, pool.page_size)
    if pages is not None:
        shape.start_after(req, pages, prefix_tokens(pages, req, pool.page_size), pool.tree)


def _page_pool() -> PagePool:
    engine = Process.engine
    assert engine is not None
    return engine.pages


def add_to_prefill(orig: Callable[..., Any], adder: Any, req: Req, *args: Any, **kwargs: Any) -> Any:
    """AROUND PrefillAdder.add_one_req: without a radix tree, SGLang admits requests with `ignore_eos` in a way that
    has no chunks behind a prefix, so a leg that has one is admitted like any other request."""
    params = req.sampling_params
    if req.april_prefix is None or not params.ignore_eos:
        return orig(adder, req, *args, **kwargs)
    params.ignore_eos = False
    try:
        return orig(adder, req, *args, **kwargs)
    finally:
        params.ignore_eos = True


def prefix_slots(orig: Callable[..., Any], tree: Any, req: Req) -> Any:
    """AROUND UnifiedRadixCache.prefix_device_indices: pages that a leg begins on need not be in the tree."""
    pages: Pages | None = getattr(req, "april_prefix", None)
    return orig(tree, req) if pages is None else pages.slots[: req.prefix_len]


def next_chunk(_: None, s: Scheduler, req: Req) -> None:
    """AFTER Scheduler.stash_chunked_request: the radix tree does not get KV of an older version, but the next chunk
    begins behind this one."""
    if req.april is not None and req.skip_radix_cache_insert:
        shape.next_chunk(s, req)
