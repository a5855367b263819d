"""KV of requests and the prefix cache in SGLang 0.5.23.

A request always has a `ReqKvInfo`, which holds its KV fields. The prefix cache is `UnifiedRadixCache`: a match gives a
length, a lock is a `TreeLock`, and the KV of a prefix that no row lists yet is read from the tree.
"""

from typing import TYPE_CHECKING, Any

from sglang_april.kv.kv_pages import Pages

if TYPE_CHECKING:
    import torch


class Kv0523:
    def has_kv(self, req: Any) -> bool:
        return bool(req.kv.holds_kv)

    def row(self, req: Any) -> Any:
        return req.kv.req_pool_idx

    def allocated(self, req: Any) -> int:
        return int(req.kv.kv_allocated_len)

    def committed(self, req: Any) -> int:
        return int(req.kv.kv_committed_len)

    def protected(self, req: Any) -> int:
        return int(req.kv.cache_protected_len)

    def lock_of(self, req: Any) -> Any:
        return req.lock

    def forget_kv(self, req: Any) -> None:
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        req.kv, req.extend_end = ReqKvInfo(), None

    def give_kv(self, req: Any, pages: Pages, tree: Any) -> None:
        req.kv.kv_allocated_len = req.kv.kv_committed_len = pages.length
        req.kv.cache_protected_len = req.kv.cache_inserted_len = pages.protected
        req.prefix_len, req.lock = pages.length, pages.node
        req.last_node = _node(pages, req, tree)

    def take_kv(self, req: Any) -> None:
        req.kv.mark_kv_released()
        req.kv.cache_protected_len = req.kv.cache_inserted_len = 0
        req.prefix_len, req.lock = 0, None

    def start_after(self, req: Any, pages: Pages, tokens: int, tree: Any) -> None:
        req.prefix_len, req.kv.cache_protected_len = tokens, min(pages.protected, tokens)
        req.last_node = req.last_host_node = req.best_match_node = _node(pages, req, tree)
        req.host_hit_length = 0

    def next_chunk(self, _s: Any, _req: Any) -> None:
        """SGLang moves `prefix_len` also if the tree does not get the KV."""

    def extend_range(self, req: Any, prefix: "torch.Tensor", end: int) -> None:
        req.april_prefix = Pages(len(prefix), 0, prefix, None, req.extra_key)  # see `hooks_legs.prefix_slots`
        req.prefix_len, req.extend_end = len(prefix), end

    def release_kv(self, req: Any, tree: Any) -> None:
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, tree, checkpoint=False)

    def is_inserted(self, *, checkpoint: bool) -> bool:
        return checkpoint

    # --- the prefix cache and the allocator

    def prefix_caches(self) -> tuple[type, ...]:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        return (UnifiedRadixCache,)

    def has_tree(self, tree: Any) -> bool:
        return bool(tree.supports_prefix_sharing())

    def slots_in_tree(self, tree: Any) -> "torch.Tensor":
        import torch

        empty = not self.has_tree(tree) or not tree.total_size()[0]
        slots: torch.Tensor = torch.empty(0, dtype=torch.int64) if empty else tree.all_values_flatten()
        return slots

    def free_pages(self, allocator: Any) -> "torch.Tensor":
        pages: torch.Tensor = allocator.get_all_free_pages()
        return pages

    def lock_prefix(self, tree: Any, req: Any, length: int) -> "tuple[torch.Tensor, Any] | None":
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(token_ids=req.origin_input_ids, extra_key=req.extra_key, cache_salt=req.cache_salt)
        found = tree.match_prefix(MatchPrefixParams(key=key))
        if found.device_prefix_len < length:
            return None
        slots = tree.path_device_indices(found.last_device_node)[:length].to(torch.int64, copy=True)
        return slots, tree.lock(found.last_device_node)

    def unlock(self, tree: Any, lock: Any) -> None:
        tree.unlock(lock)

    def insert(self, tree: Any, req: Any, ids: Any, slots: "torch.Tensor") -> "torch.Tensor":
        """SGLang's own checkpoint of the request's row, which frees slots that the tree had already, and locks."""
        req.refresh_fill_ids()
        tree.checkpoint(req, up_to=len(ids))
        return tree.req_to_token_pool.req_to_token[self.row(req), : len(ids)].to(slots.dtype, copy=True)


def _node(pages: Pages, req: Any, tree: Any) -> Any:
    """The node that a request on these pages locks; without a prefix in the tree, the root."""
    return pages.node.node if pages.node is not None else tree.root_node_handle(req.extra_key)
