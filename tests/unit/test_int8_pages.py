"""`--april-kv-pages int8`: a rank's page store with lossy pages. The error is as stated, damage is found."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from april_kernels.kv_pages import PlaneTable
from sglang_april.config import AprilConfig
from sglang_april.kv.copiers import CpuCopier
from sglang_april.kv.disk_tier import DiskTier, Key
from sglang_april.kv.host_tier import HostArena, HostPages
from sglang_april.kv.page_format import PAGE_FORMATS, PageFormat, QuantizedPages, RawPages
from sglang_april.kv.page_store import PageStore

PAGE, SLOTS, TOKENS = 4, 64, 21
KEY = Key("run", "prompt", 0, 1)


class StoreOfHalfPool:
    """A store on a bfloat16 pool of two layers, with heads of 128 as real models have them."""

    def __init__(self, folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (SLOTS, 2, 128)
        self.buffers = [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(4)]
        self.page_format = QuantizedPages(PlaneTable.mha(self.buffers[:2], self.buffers[2:]), PAGE)
        copier = CpuCopier(self.page_format, chunk_bytes=1)
        self.arena = HostArena(32, copier.page_words, pinned=False)
        self.disk = DiskTier(folder, 0, "layout", PAGE, copier.page_words)
        self.ends: dict[int, str] = {}
        self.store = PageStore(copier, self.arena, self.disk, self.ends.__setitem__)

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, planes and heads, 128]."""
        return torch.cat([buffer[slots] for buffer in self.buffers], dim=1).float()

    def outcome(self, order: int) -> str:
        self.store.wait(order)
        while order not in self.ends:
            time.sleep(0)  # reported right after
        return self.ends[order]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[StoreOfHalfPool]:
    rank = StoreOfHalfPool(tmp_path)
    yield rank
    rank.store.close()
    rank.disk.close()


def store(rank: StoreOfHalfPool, route: str, slots: torch.Tensor) -> None:
    if route == "disk":
        rank.store.copy_to_disk(1, 7, slots, KEY, 0)
    else:
        rank.store.copy_to_host(1, 7, slots, None)
    assert rank.outcome(1) == ""
    if route == "spilled":
        rank.store.spill(2, 7, KEY, len(slots), 0)
        assert rank.outcome(2) == ""


@pytest.mark.parametrize("route", ["host", "disk", "spilled"])
def test_round_trip_error_is_within_documented_bound(rank: StoreOfHalfPool, route: str) -> None:
    """At most half a code step, max|x| / 254 of a token's head, and bfloat16's own rounding; 0.7 % of the RMS."""
    slots, elsewhere = torch.randperm(SLOTS // 2)[:TOKENS], torch.arange(SLOTS // 2, SLOTS)
    wanted, others = rank.rows(slots), rank.rows(elsewhere[TOKENS:])
    store(rank, route, slots)
    rank.store.load(3, 7, elsewhere[:TOKENS])
    assert rank.outcome(3) == ""
    error = rank.rows(elsewhere[:TOKENS]) - wanted
    largest = wanted.abs().amax(-1, keepdim=True)
    assert bool((error.abs() <= largest / 254 + wanted.abs() * 2**-8 + largest / 254 * 2**-8).all())
    assert 0.005 < float(error.square().mean().sqrt() / wanted.square().mean().sqrt()) < 0.008
    assert torch.equal(rank.rows(elsewhere[TOKENS:]), others)


def test_repeated_round_trips_do_not_accumulate_error(rank: StoreOfHalfPool) -> None:
    """KV that is stored and loaded in every round does not degrade further."""
    slots = torch.arange(TOKENS)
    seen = []
    for order in range(1, 9, 2):
        rank.store.copy_to_host(order, order, slots, None)
        rank.store.load(order + 1, order, slots)
        assert (rank.outcome(order), rank.outcome(order + 1)) == ("", "")
        seen.append(rank.rows(slots))
    wear = float((seen[-1] - seen[0]).abs().max() / seen[0].abs().max())
    assert wear < 2**-8  # bfloat16's rounding of the largest value moves the scale by as much, once


@pytest.mark.parametrize("where", ["host", "disk"])
def test_damage_is_detected(rank: StoreOfHalfPool, where: str, tmp_path: Path) -> None:
    store(rank, where, torch.arange(TOKENS))
    if where == "disk":
        (path,) = tmp_path.glob("*.kv")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        held = rank.store._copies._held[7]
        assert isinstance(held, HostPages)
        rank.arena.pages(held.ranges[0])[0, 3] ^= 1
    rank.store.load(3, 7, torch.arange(TOKENS))
    assert "damaged" in rank.outcome(3)


def test_int8_halves_the_bytes_and_refuses_unsupported_pools(rank: StoreOfHalfPool) -> None:
    formats: dict[str, PageFormat] = {
        name: page_format(rank.page_format.table, PAGE) for name, page_format in PAGE_FORMATS.items()
    }
    assert isinstance(formats["full"], RawPages)
    assert formats["int8"].page_words / formats["full"].page_words == pytest.approx(0.516, abs=0.001)
    fp8 = PlaneTable.of([torch.zeros(8, 2, 16, dtype=torch.float8_e4m3fn)])
    with pytest.raises(ValueError, match="int8 pages need one dtype"):
        QuantizedPages(fp8, PAGE)


def test_budgets_use_int8_page_size_and_formats_are_not_mixed(rank: StoreOfHalfPool) -> None:
    """With the flag, the same gigabytes hold more tokens, and the file header names the page format."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from sglang_april.adapter.core.build_store import _layout, select_page_format, tier_budgets
    from sglang_april.cpu.allocator import SweepAllocator

    pool = object.__new__(MHATokenToKVPool)
    pool.k_buffer, pool.v_buffer, pool.dtype = rank.buffers[:2], rank.buffers[2:], torch.bfloat16
    allocator = object.__new__(SweepAllocator)
    allocator._kvcache = pool
    hf_config = SimpleNamespace(architectures=["Qwen3ForCausalLM"])
    scheduler: Any = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=object.__new__(ReqToTokenPool),
        tree_cache=object.__new__(RadixCache),
        server_args=SimpleNamespace(model_path="model"),
        model_config=SimpleNamespace(hf_config=hf_config),
        ps=SimpleNamespace(tp_rank=0, tp_size=2),
    )
    config = AprilConfig(host_gb=1.0, disk_gb=2.0, disk_dir="here")
    full, lossy = (select_page_format(scheduler, replace(config, kv_pages=name)) for name in ("full", "int8"))
    row = 2 * 2 * 2 * 128 * 2  # K and V, layers, heads, dim, bytes
    assert tier_budgets(config, full, 2, 2).host == 10**9 // (16 * row * 2) * 16
    assert tier_budgets(config, lossy, 2, 2).host / tier_budgets(config, full, 2, 2).host == pytest.approx(
        1 / 0.516, rel=0.01
    )
    assert tier_budgets(config, lossy, 2, 2).disk == pytest.approx(2 * tier_budgets(config, lossy, 2, 2).host, abs=16)
    before = _layout(scheduler, full)
    assert before != _layout(scheduler, lossy)
    hf_config.rope_theta = 1e6  # as --json-model-override-args sets it
    assert before != (rotated := _layout(scheduler, full))
    pool.dtype = torch.float8_e5m2  # whose buffers have the dtype of every other fp8 format
    assert rotated != _layout(scheduler, full)
    pool.k_buffer, pool.v_buffer = ([torch.zeros(8, 2, 16, dtype=torch.uint8)] for _ in "kv")  # SGLang's fp8 pools
    with pytest.raises(SystemExit, match="--april-kv-pages int8 is not supported: int8 pages need one dtype"):
        select_page_format(scheduler, replace(config, kv_pages="int8"))
