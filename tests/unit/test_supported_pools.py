"""Every pool of SGLang is refused, or a partial's pages hold all that it keeps per token (`whole-pages`)."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import mem_cache
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod
from sglang.srt.mem_cache import chunk_cache, memory_pool, radix_cache, swa_memory_pool
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_april.adapter.core import supported_pools
from sglang_april.adapter.core.supported_pools import (
    MHA_POOLS,
    MLA_POOLS,
    REFUSED_POOLS,
    check_scheduler,
    distinct_buffers,
    plane_table,
)
from sglang_april.adapter.shapes.installed import shape
from sglang_april.cpu.pool import HugePagesPool
from sglang_april.kv.copiers import CpuCopier
from sglang_april.kv.host_tier import HostArena
from sglang_april.kv.page_format import RawPages
from sglang_april.kv.page_store import PageStore

SIZE, PAGE, TOKENS = 128, 64, 37
COMMON: dict[str, Any] = {"size": SIZE, "page_size": PAGE, "device": "cpu", "enable_memory_saver": False}
MHA: dict[str, Any] = {**COMMON, "layer_num": 2, "head_num": 2, "head_dim": 32, "dtype": torch.bfloat16}
MLA: dict[str, Any] = {
    **COMMON,
    "layer_num": 2,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "dtype": torch.bfloat16,
}
DSA: dict[str, Any] = {**MLA, "index_head_dim": 128, "kv_cache_dim": 80}
SPARSE: dict[str, Any] = {
    **COMMON,
    "dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 32,
    "idx_head_dim": 32,
    "dense_layer_ids": [0],
    "sparse_layer_ids": [1],
    "start_layer": 0,
    "end_layer": 2,
}
WINDOW: dict[str, Any] = {
    "size": SIZE,
    "size_swa": SIZE,
    "page_size": PAGE,
    "dtype": torch.bfloat16,
    "head_num": 2,
    "head_dim": 32,
    "swa_attention_layer_ids": [0],
    "full_attention_layer_ids": [1],
    "device": "cpu",
}

WHOLE: dict[str, Callable[[], KVCache]] = {
    "MHATokenToKVPool": lambda: memory_pool.MHATokenToKVPool(**MHA),
    "MHATokenToKVPool, values of another size": lambda: memory_pool.MHATokenToKVPool(**MHA, v_head_dim=16),
    "MHATokenToKVPool, fp8": lambda: memory_pool.MHATokenToKVPool(**{**MHA, "dtype": torch.float8_e4m3fn}),
    "HugePagesPool": lambda: HugePagesPool(**MHA),
    "HugePagesPool, large": lambda: HugePagesPool(**{**MHA, "size": 2**18}),
    "MLATokenToKVPool": lambda: memory_pool.MLATokenToKVPool(**MLA),
}
"""Supported pools."""

PARTIAL: dict[str, Callable[[], KVCache]] = {
    "DSATokenToKVPool": lambda: memory_pool.DSATokenToKVPool(**DSA),
    "HiSparseDSATokenToKVPool": lambda: HiSparseDSATokenToKVPool(**DSA),
    "MHATokenToKVPoolFP4": lambda: memory_pool.MHATokenToKVPoolFP4(**MHA),
    "MHATokenToKVPoolMXFP8": lambda: memory_pool.MHATokenToKVPoolMXFP8(**MHA),
    "MHATokenToKVPoolMXFP8, interleaved": lambda: memory_pool.MHATokenToKVPoolMXFP8(**{**MHA, "page_size": 128}),
    "MHATokenToKVPool, quant method": lambda: memory_pool.MHATokenToKVPool(
        **MHA, quant_method=FP4MXBlock16KVCacheMethod()
    ),
    "MLATokenToKVPoolFP4": lambda: memory_pool.MLATokenToKVPoolFP4(**MLA),
    "MiniMaxSparseKVPool": lambda: memory_pool.MiniMaxSparseKVPool(**SPARSE),
    "PageMajorMHATokenToKVPool": lambda: memory_pool.PageMajorMHATokenToKVPool(**MHA),
    "SWAKVPool": lambda: swa_memory_pool.SWAKVPool(**WINDOW),
    "NoOpMHATokenToKVPool": lambda: memory_pool.NoOpMHATokenToKVPool(**MHA),
    "MHATokenToKOnlyPool": lambda: memory_pool.MHATokenToKOnlyPool(**MHA),
}
"""Refused pools that can be constructed on a CPU. The others need a GPU, or recurrent and compressed state."""

MISTAKABLE = [name for name in PARTIAL if not name.startswith(("SWA", "MiniMax", "NoOp", "MHATokenToKOnly"))]
"""Those that have the same buffers as a supported pool, and more."""


def slot_tensors(pool: Any) -> list[torch.Tensor]:
    """Each tensor of a pool that is indexed by slot."""
    return [
        tensor
        for tensor in supported_pools._tensors(pool, set())
        if tensor.ndim > 1 and tensor.shape[0] == pool.size + pool.page_size
    ]


@pytest.mark.parametrize("name", WHOLE)
def test_round_trip_restores_every_tensor_of_the_pool(name: str) -> None:
    """Pages are saved, their slots overwritten, and the pages loaded into other slots."""
    pool = WHOLE[name]()
    tensors = slot_tensors(pool)
    assert sum(tensor.nbytes for tensor in tensors) == sum(buffer.nbytes() for buffer in distinct_buffers(pool))
    for tensor in tensors:
        tensor.view(torch.uint8).random_(0, 256)
    source, target = torch.randperm(SIZE)[: 2 * TOKENS].split(TOKENS)
    before = [tensor[source].view(torch.uint8).clone() for tensor in tensors]
    copier = CpuCopier(RawPages(plane_table(pool), 16), chunk_bytes=1)
    reports: dict[int, str] = {}
    store = PageStore(copier, HostArena(8, copier.page_words, pinned=False), None, reports.__setitem__)
    try:
        store.copy_to_host(1, 7, source, None)
        store.wait(1)
        for tensor in tensors:
            tensor[source] = 0
        store.load(2, 7, target)
        store.wait(2)
    finally:
        store.close()
    after = [tensor[target].view(torch.uint8) for tensor in tensors]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("name", PARTIAL)
def test_other_pools_are_refused(name: str) -> None:
    with pytest.raises(SystemExit, match=r"sglang-april: The KV pool [A-Za-z0-9]+ is not supported: "):
        plane_table(PARTIAL[name]())


@pytest.mark.parametrize("name", MISTAKABLE)
def test_pools_with_more_than_their_planes_are_refused_by_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the allowlist of classes, the count of bytes refuses them."""
    pool = PARTIAL[name]()
    group = "MLA_POOLS" if hasattr(pool, "kv_buffer") else "MHA_POOLS"
    monkeypatch.setattr(supported_pools, group, (type(pool),))
    with pytest.raises(
        (SystemExit, ValueError), match=r"bytes per token, of which the page store would copy|pools are not"
    ):
        plane_table(pool)


def test_every_pool_class_of_sglang_was_reviewed() -> None:
    """A class that a new release adds is in neither list. Those that cannot be constructed here are refused unbuilt."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(mem_cache.__path__, mem_cache.__name__ + "."):
        if "pool" in module.name or "dsa_cache" in module.name:
            for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if issubclass(cls, KVCache) and cls.__module__ == module.name and not inspect.isabstract(cls):
                    found[cls.__name__] = cls
    supported = {cls.__name__ for cls in MHA_POOLS + MLA_POOLS}
    assert not supported & set(REFUSED_POOLS)
    assert set(found) - supported <= set(REFUSED_POOLS)
    for name in set(found) - supported:
        with pytest.raises(SystemExit, match=f"The KV pool {name} is not supported"):
            plane_table(found[name].__new__(found[name]))


class Subclass(memory_pool.ReqToTokenPool):
    """An unknown request pool, such as one with state by request slot."""


class RadixCacheCpp(radix_cache.RadixCache):
    """Replaces SGLang's class of this name, whose module compiles C++ when it is imported."""


@pytest.mark.parametrize(
    ("part", "cls", "sentence"),
    [
        ("req_to_token_pool", Subclass, "The request pool Subclass is not supported: only ReqToTokenPool are"),
        ("req_to_token_pool", memory_pool.HybridReqToTokenPool, "The request pool HybridReqToTokenPool is not"),
        ("tree_cache", RadixCacheCpp, "The prefix cache RadixCacheCpp is not supported"),
        ("tree_cache", chunk_cache.SWAChunkCache, "The prefix cache SWAChunkCache is not supported"),
    ],
)
def test_other_parts_of_the_scheduler_are_refused(part: str, cls: type, sentence: str) -> None:
    parts: dict[str, Any] = {
        "req_to_token_pool": memory_pool.ReqToTokenPool,
        "token_to_kv_pool_allocator": TokenToKVPoolAllocator,
        "tree_cache": radix_cache.RadixCache,
    }
    scheduler: Any = SimpleNamespace(**{name: each.__new__(each) for name, each in parts.items()})
    check_scheduler(scheduler)
    setattr(scheduler, part, cls.__new__(cls))
    with pytest.raises(SystemExit, match=f"sglang-april: {sentence}"):
        check_scheduler(scheduler)


def test_a_disabled_radix_cache_shares_no_prefix() -> None:
    """SGLang builds one for multimodal models on the transformers backend."""
    assert [shape.has_tree(RadixCache.create_simulated(disable=disabled)) for disabled in (False, True)] == [
        True,
        False,
    ]
