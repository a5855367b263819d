"""What 0.5.15.post1 to 0.5.18 have in common (`interface.Shape`).

A request stores its KV fields itself, the prefix cache is `RadixCache`, a lock is the locked node of its tree, and
every weight call stands alone.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_april.adapter.hook import Hook
from sglang_april.adapter.shapes.interface import Argument
from sglang_april.kv.kv_pages import Pages

if TYPE_CHECKING:
    import torch


class Until0518:
    TARGETS: Mapping[str, tuple[str, ...]] = {}
    HOOKS: tuple[Hook, ...] = ()
    DEPENDS_ON: tuple[str, ...] = (
        "sglang.srt.server_args.ServerArgs.get_model_config",
        "sglang.srt.managers.schedule_batch.Req.set_extend_range",
        "sglang.srt.mem_cache.chunk_cache.ChunkCache",
        "sglang.srt.mem_cache.radix_cache.RadixCache.cache_unfinished_req",
        "sglang.srt.mem_cache.radix_cache.RadixCache.dec_lock_ref",
        "sglang.srt.mem_cache.radix_cache.RadixCache.evict",
        "sglang.srt.mem_cache.radix_cache.RadixCache.inc_lock_ref",
        "sglang.srt.mem_cache.radix_cache.RadixCache.insert",
        "sglang.srt.mem_cache.radix_cache.RadixCache.match_prefix",
    )

    def arguments(self, args: Any) -> Iterator[Argument]:
        for field in dataclasses.fields(args):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            yield Argument(field.name, getattr(args, field.name), default)

    def resolved(self, args: Any) -> Any:
        return args

    def model_config(self, args: Any) -> Any:
        return args.get_model_config()

    def beam_rows(self, _s: Any, _reqs: Iterable[Any]) -> int:
        return 0

    def has_kv(self, req: Any) -> bool:
        return req.req_pool_idx is not None

    def row(self, req: Any) -> Any:
        return req.req_pool_idx

    def committed(self, req: Any) -> int:
        return int(req.kv_committed_len)

    def protected(self, req: Any) -> int:
        return int(req.cache_protected_len)

    def lock_of(self, req: Any) -> Any:
        return req.last_node

    def forget_kv(self, req: Any) -> None:
        req.req_pool_idx, req.extend_range, req.kv_committed_len = None, None, 0

    def _hold(self, req: Any, pages: Pages, tree: Any) -> None:
        """The part of `give_kv` that is the same in these releases."""
        req.kv_committed_len = pages.length
        req.cache_protected_len, req.last_node = pages.protected, pages.node or _root(tree)
        req.prefix_indices = pages.slots[: pages.protected]

    def _drop_prefix(self, req: Any) -> None:
        """The part of `take_kv` that is the same in these releases."""
        import torch

        req.prefix_indices = torch.empty((0,), dtype=torch.int64)

    def start_after(self, req: Any, pages: Pages, tokens: int, tree: Any) -> None:
        req.prefix_indices = pages.slots[:tokens]
        req.cache_protected_len = min(pages.protected, tokens)
        req.last_node = pages.node if pages.node is not None else _root(tree)
        req.last_host_node = req.best_match_node = req.last_node
        req.host_hit_length = 0

    def next_chunk(self, s: Any, req: Any) -> None:
        import torch

        done = len(req.get_fill_ids())
        req.prefix_indices = s.req_to_token_pool.req_to_token[req.req_pool_idx, :done].to(torch.int64, copy=True)

    def extend_range(self, req: Any, prefix: "torch.Tensor", end: int) -> None:
        req.prefix_indices = prefix
        req.set_extend_range(len(prefix), end)

    def release_kv(self, req: Any, tree: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, tree, is_insert=False)

    def is_inserted(self, is_insert: bool = True) -> bool:
        return is_insert

    def prefix_caches(self) -> tuple[type, ...]:
        from sglang.srt.mem_cache.chunk_cache import ChunkCache
        from sglang.srt.mem_cache.radix_cache import RadixCache

        return RadixCache, ChunkCache

    def has_tree(self, tree: Any) -> bool:
        return not tree.is_chunk_cache() and not tree.disable

    def slots_in_tree(self, tree: Any) -> "torch.Tensor":
        import torch

        empty = tree.is_chunk_cache() or not tree.total_size()
        slots: torch.Tensor = torch.empty(0, dtype=torch.int64) if empty else tree.all_values_flatten()
        return slots

    def free_pages(self, allocator: Any) -> "torch.Tensor":
        import torch

        return torch.cat([allocator.free_pages, allocator.release_pages])

    def lock_prefix(self, tree: Any, req: Any, length: int) -> "tuple[torch.Tensor, Any] | None":
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(token_ids=req.origin_input_ids, extra_key=req.extra_key)
        found = tree.match_prefix(MatchPrefixParams(key=key, req=req))
        if len(found.device_indices) < length:
            return None
        tree.inc_lock_ref(found.last_device_node)
        return found.device_indices[:length].to(torch.int64, copy=True), found.last_device_node

    def unlock(self, tree: Any, lock: Any) -> None:
        tree.dec_lock_ref(lock)

    def insert(self, tree: Any, req: Any, ids: Any, slots: "torch.Tensor") -> "torch.Tensor":
        """As `RadixCache.cache_unfinished_req` does."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        if tree.disable_finished_insert:
            return slots
        key = RadixKey(ids, req.extra_key).page_aligned(tree.page_size)
        known = tree.insert(InsertParams(key=key, value=slots[: len(key)].clone(), priority=req.priority or 0))
        tree.token_to_kv_pool_allocator.free(slots[req.cache_protected_len : known.prefix_len])
        found = tree.match_prefix(MatchPrefixParams(key=key))
        tree.dec_lock_ref(req.last_node)
        tree.inc_lock_ref(found.last_device_node)
        req.cache_protected_len, req.last_node = len(found.device_indices), found.last_device_node
        return torch.cat([found.device_indices.to(torch.int64), slots[len(found.device_indices) :]])

    def tp_rank(self, s: Any) -> int:
        return int(s.ps.tp_rank)

    def tp_size(self, s: Any) -> int:
        return int(s.ps.tp_size)

    def may_clear(self, manager: Any, _s: Any) -> bool:
        return bool(manager.is_fully_idle())

    def in_flight(self, s: Any) -> Iterable[Any]:
        return [req for batch in (s.running_batch, s.last_batch) if batch is not None for req in batch.reqs]

    def remove(self, batch: Any, reqs: Sequence[Any]) -> None:
        batch.filter_batch(chunked_req_to_exclude=list(reqs))

    def record_label(
        self, original: Callable[..., None], s: Any, label: str | None, _suspended: Iterable[tuple[Any, int]]
    ) -> None:
        original(s, label)

    def weight_session(self, _manager: Any, _recv_req: Any, *, keep: bool) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 - the interface's name
        return contextlib.nullcontext()

    def end_weight_session(self, _s: Any) -> None:
        """There is none."""

    def sampled(self, tokens: "torch.Tensor", _stock: Any = None) -> Any:
        return tokens

    def tokens_of(self, stock: Any) -> "torch.Tensor":
        tokens: torch.Tensor = stock
        return tokens


def _root(tree: Any) -> Any:
    """The node that requests without a prefix in the radix tree lock; None without a tree."""
    return None if tree.is_chunk_cache() else tree.root_node
