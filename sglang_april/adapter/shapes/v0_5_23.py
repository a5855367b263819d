"""SGLang 0.5.23 (`interface.Shape`).

A request always has a `ReqKvInfo`, which holds its KV fields. The prefix cache is `UnifiedRadixCache`: a match gives a
length, a lock is a `TreeLock`, and the KV of a prefix that no row lists yet is read from the tree. `ServerArgs` keeps
what the user gave, beside what SGLang has decided. Weights are sent in tensors or over a group only in a session.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_april.adapter.shapes.batch_plan import (
    batch_of,
    enter_prefill,
    enter_step,
    forget_last_batch,
    next_batch,
    no_prefill,
    prefill,
)
from sglang_april.adapter.shapes.interface import Argument
from sglang_april.adapter.shapes.tables_0_5_23 import DEPENDS_ON, HOOKS, TARGETS
from sglang_april.kv.kv_pages import Pages

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEPENDS_ON",
    "HOOKS",
    "TARGETS",
    "batch_of",
    "enter_prefill",
    "enter_step",
    "forget_last_batch",
    "next_batch",
    "no_prefill",
    "prefill",
]

# --- arguments


def arguments(args: Any) -> Iterator[Argument]:
    import msgspec
    from sglang.srt.arg_groups.arg_utils import record_fields, with_fallback
    from sglang.srt.arg_groups.overrides import resolution_result

    for field in record_fields(type(args)):
        factory = field.default_factory
        default = field.default if factory is msgspec.NODEFAULT else factory()
        yield Argument(field.name, resolution_result(args, field.name), with_fallback(type(args), field.name, default))


def resolved(args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import resolving_view

    return resolving_view(args)


def model_config(args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(args)


# --- KV of a request


def has_kv(req: Any) -> bool:
    return bool(req.kv.holds_kv)


def row(req: Any) -> Any:
    return req.kv.req_pool_idx


def allocated(req: Any) -> int:
    return int(req.kv.kv_allocated_len)


def committed(req: Any) -> int:
    return int(req.kv.kv_committed_len)


def protected(req: Any) -> int:
    return int(req.kv.cache_protected_len)


def lock_of(req: Any) -> Any:
    return req.lock


def forget_kv(req: Any) -> None:
    from sglang.srt.managers.schedule_batch import ReqKvInfo

    req.kv, req.extend_end = ReqKvInfo(), None


def give_kv(req: Any, pages: Pages, tree: Any) -> None:
    req.kv.kv_allocated_len = req.kv.kv_committed_len = pages.length
    req.kv.cache_protected_len = req.kv.cache_inserted_len = pages.protected
    req.prefix_len, req.lock = pages.length, pages.node
    req.last_node = _node(pages, req, tree)


def take_kv(req: Any) -> None:
    req.kv.mark_kv_released()
    req.kv.cache_protected_len = req.kv.cache_inserted_len = 0
    req.prefix_len, req.lock = 0, None


def start_after(req: Any, pages: Pages, tokens: int, tree: Any) -> None:
    req.prefix_len, req.kv.cache_protected_len = tokens, pages.protected
    req.last_node = req.last_host_node = req.best_match_node = _node(pages, req, tree)
    req.host_hit_length = 0


def _node(pages: Pages, req: Any, tree: Any) -> Any:
    """The node that a request on these pages locks; without a prefix in the tree, the root."""
    return pages.node.node if pages.node is not None else tree.root_node_handle(req.extra_key)


def next_chunk(_s: Any, _req: Any) -> None:
    """SGLang moves `prefix_len` also if the tree does not get the KV."""


def extend_range(req: Any, prefix: "torch.Tensor", end: int) -> None:
    req.april_prefix = Pages(len(prefix), 0, prefix, None, req.extra_key)  # see `hooks_legs.prefix_slots`
    req.prefix_len, req.extend_end = len(prefix), end


def release_kv(req: Any, tree: Any) -> None:
    from sglang.srt.mem_cache.common import release_kv_cache

    release_kv_cache(req, tree, checkpoint=False)


def is_inserted(*, checkpoint: bool) -> bool:
    return checkpoint


# --- the prefix cache and the allocator


def prefix_caches() -> tuple[type, ...]:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return (UnifiedRadixCache,)


def has_tree(tree: Any) -> bool:
    return bool(tree.supports_prefix_sharing())


def slots_in_tree(tree: Any) -> "torch.Tensor":
    import torch

    empty = not has_tree(tree) or not tree.total_size()[0]
    slots: torch.Tensor = torch.empty(0, dtype=torch.int64) if empty else tree.all_values_flatten()
    return slots


def free_pages(allocator: Any) -> "torch.Tensor":
    pages: torch.Tensor = allocator.get_all_free_pages()
    return pages


def lock_prefix(tree: Any, req: Any, length: int) -> "tuple[torch.Tensor, Any] | None":
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(token_ids=req.origin_input_ids, extra_key=req.extra_key, cache_salt=req.cache_salt)
    found = tree.match_prefix(MatchPrefixParams(key=key))
    if found.device_prefix_len < length:
        return None
    slots = tree.path_device_indices(found.last_device_node)[:length].to(torch.int64, copy=True)
    return slots, tree.lock(found.last_device_node)


def unlock(tree: Any, lock: Any) -> None:
    tree.unlock(lock)


def insert(tree: Any, req: Any, ids: Any, slots: "torch.Tensor") -> "torch.Tensor":
    """SGLang's own checkpoint of the request's row, which frees slots that the tree had already, and locks."""
    req.refresh_fill_ids()
    tree.checkpoint(req, up_to=len(ids))
    return tree.req_to_token_pool.req_to_token[row(req), : len(ids)].to(slots.dtype, copy=True)


# --- the scheduler


def tp_rank(_s: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def tp_size(_s: Any) -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_size)


def may_clear(manager: Any, s: Any) -> bool:
    return bool(manager.is_fully_idle(ignore_waiting=s._engine_paused))


def in_flight(s: Any) -> Iterable[Any]:
    reqs: Iterable[Any] = s.collect_inflight_reqs()
    return reqs


def remove(batch: Any, reqs: Sequence[Any]) -> None:
    batch.filter_batch(reqs_to_exclude=list(reqs))


# --- the HTTP process


def forget_unused_states(_manager: Any, _obj: Any) -> None:
    """SGLang removes them."""


# --- weights


@contextlib.contextmanager
def weight_session(manager: Any, recv_req: Any, *, keep: bool) -> Iterator[None]:
    needed = type(recv_req).__name__ in ("UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput")
    if not needed or manager._session is not None:
        yield
        return
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

    _unhooked("begin_weight_update")(manager, BeginWeightUpdateReqInput())
    try:
        yield
    finally:
        if not keep:
            _end(manager)


def end_weight_session(s: Any) -> None:
    if s.weight_updater._session is not None:
        _end(s.weight_updater)


def _end(manager: Any) -> None:
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    _unhooked("end_weight_update")(manager, EndWeightUpdateReqInput())


def _unhooked(name: str) -> Any:
    """SGLang's method: the hooks are for sessions that clients open and end."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    method = getattr(SchedulerWeightUpdaterManager, name)
    return getattr(method, "__wrapped__", method)


# --- forwards and models


def sampled(tokens: "torch.Tensor", stock: Any = None) -> Any:
    return tokens, None if stock is None else stock[1]


def tokens_of(stock: Any) -> "torch.Tensor":
    tokens: torch.Tensor = stock[0]
    return tokens


def forward_batch(batch: Any, runner: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def logits(processor: Any, states: "torch.Tensor", lm_head: Any, metadata: Any) -> "torch.Tensor":
    result: torch.Tensor = processor._get_logits(states, lm_head, metadata, use_logits_buffer=False)
    return result


def is_recurrent(model: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None
