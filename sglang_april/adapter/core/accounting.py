"""Checks that every pool token and request slot has exactly one owner at a step boundary (`pool-accounting`)."""

from collections.abc import Iterable, Iterator

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler

from sglang_april.adapter.shapes.installed import shape
from sglang_april.kv.kv_pages import Pages


class AccountingError(AssertionError):
    """Pages leaked, or owned twice."""


def check_accounting(s: Scheduler, held: Iterable[Pages]) -> dict[str, int]:
    """Recount both pools from their slot sets. Called at a step boundary; a step may be in flight.

    Returns tokens by owner: available, evictable, protected, held, running, total.

    Raises:
        AccountingError: a token slot or request slot has no owner, or more than one.
    """
    allocator, tree = s.token_to_kv_pool_allocator, s.tree_cache
    page, total = allocator.page_size, s.max_total_num_tokens
    free, in_tree = shape.free_pages(allocator), shape.slots_in_tree(tree)
    held = list(held)
    held_slots = [p.slots[p.protected :] for p in held if p.slots is not None]
    requests = list(_with_kv(s))
    running_slots = [
        s.req_to_token_pool.req_to_token[shape.row(r), shape.protected(r) : shape.allocated(r)].to(torch.int64)
        for r in requests
    ]
    owners = [free, *(_pages(x, page) for x in (in_tree, *held_slots, *running_slots))]
    counts = torch.bincount(torch.cat([o.to("cpu", torch.int64) for o in owners]), minlength=total // page + 1)[1:]
    if not bool((counts == 1).all()):
        lost, twice = int((counts == 0).sum()), int((counts > 1).sum())
        raise AccountingError(f"KV pool: {lost} pages without an owner, {twice} with more than one")
    _check_request_slots(s, requests)
    sizes = {
        "available": allocator.available_size(),
        "evictable": tree.evictable_size(),
        "protected": tree.protected_size(),
        "held": sum(_pages(x, page).numel() for x in held_slots) * page,
        "running": sum(_pages(x, page).numel() for x in running_slots) * page,
    }
    if sum(sizes.values()) != total:
        raise AccountingError(f"KV pool: {sizes} do not add up to {total}")
    return {**sizes, "total": total}


def pool_tokens(s: Scheduler) -> dict[str, int]:
    """KV pool tokens by owner, from SGLang's counters, without the tokens that partials hold."""
    page = s.token_to_kv_pool_allocator.page_size
    return {
        "available": s.token_to_kv_pool_allocator.available_size(),
        "evictable": s.tree_cache.evictable_size(),
        "protected": s.tree_cache.protected_size(),
        "running": sum(-(-shape.allocated(r) // page) * page - shape.protected(r) for r in _with_kv(s)),
        "total": s.max_total_num_tokens,
    }


def _pages(slots: torch.Tensor, page: int) -> torch.Tensor:
    """Page numbers of token slots, each page once."""
    return slots if page == 1 else torch.unique(slots // page)


def _with_kv(s: Scheduler) -> Iterator[Req]:
    """Requests with KV in the running batch, the last batch and the chunked request, each once."""
    seen: set[int] = set()
    last = s.last_batch.reqs if s.last_batch is not None else []
    chunked = [s.chunked_req] if s.chunked_req is not None else []
    for req in [*s.running_batch.reqs, *last, *chunked]:
        if shape.has_kv(req) and id(req) not in seen:
            seen.add(id(req))
            yield req


def _check_request_slots(s: Scheduler, requests: list[Req]) -> None:
    pool = s.req_to_token_pool
    owned = sorted([*pool.free_slots, *(shape.row(r) for r in requests)])
    if owned != list(range(1, pool.size + 1)):
        raise AccountingError(
            f"request slots: {len(set(owned))} of {pool.size} have an owner, {len(owned)} are claimed"
        )
