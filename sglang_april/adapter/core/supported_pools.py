"""The pools, allocators and prefix caches of SGLang that the page store works with (`whole-pages`).

A partial is stored whole or not at all: SGLang's classes are accepted by exact type, because a subclass may keep more
than its parent (DSA's index keys, the scales of MXFP8 and FP4), and every byte that the pool allocates must belong to a
plane that the store copies.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool

from april_kernels.kv_pages import PlaneTable
from sglang_april.adapter.core.reviewed_pools import REFUSED_POOLS
from sglang_april.adapter.refusals import Refusal, stop_if
from sglang_april.adapter.shapes.installed import shape
from sglang_april.cpu.allocator import SweepAllocator, TorchPagedAllocator
from sglang_april.cpu.pool import HugePagesPool

MHA_POOLS: tuple[type, ...] = (MHATokenToKVPool, HugePagesPool)
MLA_POOLS: tuple[type, ...] = (MLATokenToKVPool,)
REQUEST_POOLS: tuple[type, ...] = (ReqToTokenPool,)
ALLOCATORS: tuple[type, ...] = (
    TokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    SweepAllocator,
    TorchPagedAllocator,
)

_ADDRESSES = frozenset({"k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides"})
"""Attributes of a pool that hold addresses and strides of its buffers, not KV."""


def check_scheduler(s: Scheduler) -> None:
    """Check all parts that hold per-token or per-request state, apart from the KV pool.

    Raises:
        SystemExit: a part is of a class that was not reviewed.
    """
    parts = {
        "request pool": (s.req_to_token_pool, REQUEST_POOLS),
        "KV allocator": (s.token_to_kv_pool_allocator, ALLOCATORS),
        "prefix cache": (s.tree_cache, shape.prefix_caches()),
    }
    for what, (part, supported) in parts.items():
        if type(part) not in supported:
            names = ", ".join(cls.__name__ for cls in supported)
            stop_if(Refusal(f"The {what} {type(part).__name__}", f"only {names} are supported"))


def plane_table(pool: Any) -> PlaneTable:
    """The planes of a KV pool, which together are all that the pool holds.

    Raises:
        SystemExit: the pool's class was not reviewed, or it holds bytes that would not be stored.
        ValueError: the kernels do not support the layout (head-major, page-major).
    """
    name = type(pool).__name__
    if type(pool) not in MHA_POOLS + MLA_POOLS:
        stop_if(Refusal(f"The KV pool {name}", REFUSED_POOLS.get(name, "it has not been reviewed")))
    latent = type(pool) in MLA_POOLS
    table = PlaneTable.mla(pool.kv_buffer) if latent else PlaneTable.mha(pool.k_buffer, pool.v_buffer)
    stored, held = 4 * table.token_words, sum(memory.nbytes() for memory in distinct_buffers(pool)) / table.slots
    if stored != held:
        why = f"it holds {held:.10g} bytes per token, of which the page store would copy {stored}"
        stop_if(Refusal(f"The KV pool {name}", why))
    return table


def distinct_buffers(pool: Any) -> list[torch.UntypedStorage]:
    """The memory of all tensors that a pool holds, directly or through the objects that it consists of, each once."""
    storages = (tensor.untyped_storage() for tensor in _tensors(pool, set()))
    return list({storage.data_ptr(): storage for storage in storages}.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, seen)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in _ADDRESSES:
                yield from _tensors(item, seen)
    elif type(value).__module__.startswith(_PARTS):
        yield from _tensors(getattr(value, "__dict__", {}), seen)


_PARTS = ("sglang.srt.mem_cache.", "sglang.srt.layers.quantization.", "sglang_april.cpu.")
"""Modules of the classes that pools consist of."""
