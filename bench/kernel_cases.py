"""The cases of bench/kernels.py: the page kernels, alternatives to them, and the limits of the machine.

Every case moves the KV of the same tokens of the same pool, which is SGLang's if SGLang can be imported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from april_kernels import kv_pages
from april_kernels.kv_pages import PlaneTable

STAGING_BYTES = 128 << 20
"""Size of each of the two device buffers through which pages are copied to the host."""
SGLANG_BLOCKS = (2, 16, 64)
ZERO_COPY_PROGRAMS = (4, 16, 64, 256)


@dataclass(frozen=True)
class KernelConfig:
    """Shape of the KV of one model; the defaults are Qwen3-4B's."""

    layers: int
    heads: int
    dim: int
    dtype: str
    page_tokens: int


@dataclass
class KernelCase:
    name: str
    run: Callable[[], object]
    peak: str | None
    """Name of the case whose rate is the upper limit of this one."""
    passes: int
    """Transfers per byte: 2 within a memory (read and write), 1 over a link."""
    programs: int | None = None
    kv_bytes: int | None = None
    """Bytes moved, if not the KV of all tokens."""


@dataclass(frozen=True)
class Missing:
    """A case that cannot run here, and the reason."""

    name: str
    why: str


class KernelTestbed:
    """One pool with the KV of `tokens` tokens, and memory for their pages."""

    def __init__(self, config: KernelConfig, tokens: int, device: str) -> None:
        self.config, self.tokens, self.device = config, tokens, device
        dtype = getattr(torch, config.dtype)
        size = 2 * tokens + 1
        self.sglang, self.why_not = _sglang_pool(config, size, dtype, device)
        if self.sglang is None:
            shape = (size, config.heads, config.dim)
            self.k, self.v = (
                [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.layers)] for _ in "kv"
            )
        else:
            self.k, self.v = self.sglang.k_buffer, self.sglang.v_buffer
        for buffer in (*self.k, *self.v):
            buffer.copy_(torch.randn(buffer.shape[1:], device=device).expand_as(buffer))
        self.table = PlaneTable.mha(self.k, self.v)
        self.random = torch.randperm(size - 1, device=device)[:tokens] + 1
        self.contiguous = torch.arange(1, tokens + 1, device=device)
        n_pages = kv_pages.page_count(tokens, config.page_tokens)
        self.pages = torch.empty((n_pages, self.table.page_words(config.page_tokens)), dtype=torch.int32, device=device)

    @property
    def kv_bytes(self) -> int:
        return 4 * self.tokens * self.table.token_words

    @cached_property
    def pinned(self) -> torch.Tensor:
        # Pinned at allocation: on ROCm, memory that is registered later has another address on the device.
        return torch.empty(self.pages.shape, dtype=torch.int32, pin_memory=True)

    @cached_property
    def other_pages(self) -> torch.Tensor:
        return torch.empty_like(self.pages)


def _sglang_pool(config: KernelConfig, size: int, dtype: torch.dtype, device: str) -> tuple[Any, str]:
    try:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool(size - 1, 1, dtype, config.heads, config.dim, config.layers, device, False), ""
    except Exception as error:  # noqa: BLE001 (the other cases need no working SGLang)
        return None, f"no SGLang pool: {error!r}"[:300]


def cases(testbed: KernelTestbed) -> Iterator[KernelCase | Missing]:
    yield from _within_memory(testbed)
    yield from _sglang_copies(testbed)
    if testbed.device == "cpu":
        yield Missing("link, staging, zero copy, sglang kernels, flashinfer", "no GPU present")
        return
    yield from _over_the_link(testbed)
    yield from _sglang_kernels(testbed)
    yield from _flashinfer(testbed)


def _within_memory(testbed: KernelTestbed) -> Iterator[KernelCase]:
    table, page_tokens, pages = testbed.table, testbed.config.page_tokens, testbed.pages
    page_bytes = 4 * pages.numel()

    def pack(slots: torch.Tensor, **options: Any) -> Callable[[], object]:
        return lambda: kv_pages.pack(table, slots, page_tokens, out=pages, **options)

    yield KernelCase("copy peak", lambda: testbed.other_pages.copy_(pages), None, 2, kv_bytes=page_bytes)
    yield KernelCase("pack, random slots", pack(testbed.random), "copy peak", 2)
    yield KernelCase("pack, contiguous slots", pack(testbed.contiguous), "copy peak", 2)
    yield KernelCase("pack into new memory", lambda: kv_pages.pack(table, testbed.random, page_tokens), "copy peak", 2)
    yield KernelCase("pack and checksum", pack(testbed.random, checksum=True), "copy peak", 2)
    yield KernelCase("checksum alone", lambda: kv_pages.checksum(pages), "copy peak", 1, kv_bytes=page_bytes)
    yield KernelCase("unpack, random slots", lambda: kv_pages.unpack(table, testbed.random, pages), "copy peak", 2)
    yield KernelCase(
        "unpack, contiguous slots", lambda: kv_pages.unpack(table, testbed.contiguous, pages), "copy peak", 2
    )

    rows = [torch.empty((testbed.tokens, *b.shape[1:]), dtype=b.dtype, device=b.device) for b in table.buffers]

    def gather() -> None:
        for buffer, row in zip(table.buffers, rows, strict=True):
            torch.index_select(buffer, 0, testbed.random, out=row)

    def scatter() -> None:
        for buffer, row in zip(table.buffers, rows, strict=True):
            buffer.index_copy_(0, testbed.random, row)

    yield KernelCase("torch index_select", gather, "copy peak", 2)
    yield KernelCase("torch index_copy_", scatter, "copy peak", 2)


def _sglang_copies(testbed: KernelTestbed) -> Iterator[KernelCase | Missing]:
    pool = testbed.sglang
    if pool is None:
        yield Missing("sglang get_cpu_copy", testbed.why_not)
        return
    over_link = testbed.device != "cpu"
    peaks, passes = (("d2h peak", "h2d peak"), 1) if over_link else (("copy peak",) * 2, 2)
    copy = pool.get_cpu_copy(testbed.random)
    yield KernelCase("sglang get_cpu_copy", lambda: pool.get_cpu_copy(testbed.random), peaks[0], passes)
    yield KernelCase("sglang load_cpu_copy", lambda: pool.load_cpu_copy(copy, testbed.random), peaks[1], passes)


def _over_the_link(testbed: KernelTestbed) -> Iterator[KernelCase]:
    pages, pinned, page_bytes = testbed.pages, testbed.pinned, 4 * testbed.pages.numel()
    yield KernelCase("d2h peak", lambda: pinned.copy_(pages, non_blocking=True), None, 1, kv_bytes=page_bytes)
    yield KernelCase("h2d peak", lambda: pages.copy_(pinned, non_blocking=True), None, 1, kv_bytes=page_bytes)
    yield KernelCase("staged pack to host", _staged(testbed, to_host=True), "d2h peak", 1)
    yield KernelCase("staged unpack from host", _staged(testbed, to_host=False), "h2d peak", 1)
    for programs in ZERO_COPY_PROGRAMS:

        def zero_copy(programs: int = programs) -> object:
            return kv_pages.pack(
                testbed.table, testbed.random, testbed.config.page_tokens, out=pinned, programs=programs
            )

        yield KernelCase("zero-copy pack to host", zero_copy, "d2h peak", 1, programs)


def _staged(testbed: KernelTestbed, *, to_host: bool) -> Callable[[], None]:
    """Copy in pieces through two buffers: while one is packed (or unpacked), the copy engine moves the other."""
    page_tokens, (n_pages, words) = testbed.config.page_tokens, testbed.pages.shape
    piece = max(1, min(n_pages, STAGING_BYTES // (4 * words)))
    buffers = [torch.empty((piece, words), dtype=torch.int32, device=testbed.device) for _ in range(2)]
    link, freed = torch.cuda.Stream(), [torch.cuda.Event(), torch.cuda.Event()]

    def run() -> None:
        main = torch.cuda.current_stream()
        link.wait_stream(main)
        for i, first in enumerate(range(0, n_pages, piece)):
            host = testbed.pinned[first : first + piece]
            stage, done = buffers[i % 2][: host.shape[0]], freed[i % 2]
            slots = testbed.random[first * page_tokens : (first + piece) * page_tokens]
            before, after = (main, link) if to_host else (link, main)
            if i >= 2:
                before.wait_event(done)
            with torch.cuda.stream(before):
                if to_host:
                    kv_pages.pack(testbed.table, slots, page_tokens, out=stage)
                else:
                    stage.copy_(host, non_blocking=True)
            after.wait_stream(before)
            with torch.cuda.stream(after):
                if to_host:
                    host.copy_(stage, non_blocking=True)
                else:
                    kv_pages.unpack(testbed.table, slots, stage)
                done.record(after)
        main.wait_stream(link)

    return run


def _sglang_kernels(testbed: KernelTestbed) -> Iterator[KernelCase | Missing]:
    try:
        from sgl_kernel.kvcacheio import transfer_kv_all_layer_lf_pf as transfer
    except Exception as error:  # noqa: BLE001 (see _sglang_pool)
        yield Missing("sglang transfer_kv_all_layer_lf_pf", repr(error)[:300])
        return
    k, v = ([b.data_ptr() for b in buffers] for buffers in (testbed.k, testbed.v))
    k_table, v_table = (torch.tensor(p, dtype=torch.uint64, device=testbed.device) for p in (k, v))
    row = testbed.k[0][0].numel() * testbed.k[0].itemsize
    layers, places = testbed.config.layers, torch.arange(testbed.tokens, device=testbed.device)
    shape = (testbed.tokens, layers, testbed.config.heads, testbed.config.dim)
    for where, peak, passes in (("device", "copy peak", 2), ("host", "d2h peak", 1)):
        options = {"device": testbed.device} if where == "device" else {"pin_memory": True}
        to_k, to_v = (torch.empty(shape, dtype=testbed.k[0].dtype, **options) for _ in range(2))
        for blocks in SGLANG_BLOCKS:

            def run(to_k: torch.Tensor = to_k, to_v: torch.Tensor = to_v, blocks: int = blocks) -> None:
                transfer(k_table, to_k, v_table, to_v, testbed.random, places, row, row * layers, layers, blocks)

            yield KernelCase(f"sglang transfer_kv_all_layer_lf_pf to {where}", run, peak, passes, blocks)


def _flashinfer(testbed: KernelTestbed) -> Iterator[KernelCase | Missing]:
    """Attention over resumed pages against pages that never moved, and flashinfer's append against this unpack."""
    try:
        import flashinfer
    except Exception as error:  # noqa: BLE001 (see _sglang_pool)
        yield Missing("flashinfer", repr(error)[:300])
        return
    ints = {"dtype": torch.int32, "device": testbed.device}
    indptr, last = torch.tensor([0, testbed.tokens], **ints), torch.ones(1, **ints)
    heads, dim, dtype = testbed.config.heads, testbed.config.dim, testbed.k[0].dtype
    query = torch.randn(1, 4 * heads, dim, device=testbed.device).to(dtype)
    # A pool of single slots is a paged cache with pages of one token: [slots, 1, heads, dim].
    caches = [(k.unsqueeze(1), v.unsqueeze(1)) for k, v in zip(testbed.k, testbed.v, strict=True)]
    resumed = (torch.randperm(2 * testbed.tokens, device=testbed.device) + 1)[: testbed.tokens]
    pages, _ = kv_pages.pack(testbed.table, testbed.random, testbed.config.page_tokens, out=testbed.pages)

    def attention(slots: torch.Tensor) -> Callable[[], object]:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=testbed.device), "NHD"
        )
        pages_of_one = slots.to(torch.int32)
        wrapper.plan(indptr, pages_of_one, last, 4 * heads, heads, dim, 1, q_data_type=dtype, kv_data_type=dtype)
        return lambda: [wrapper.run(query, cache) for cache in caches]

    yield KernelCase("flashinfer decode, pages that never moved", attention(testbed.random), None, 1)
    kv_pages.unpack(testbed.table, resumed, pages)
    yield KernelCase("flashinfer decode, resumed pages", attention(resumed), None, 1)

    rows = [torch.empty((testbed.tokens, heads, dim), dtype=dtype, device=testbed.device) for _ in range(2)]
    batch, positions = torch.zeros(testbed.tokens, **ints), torch.arange(testbed.tokens, **ints)
    append_to = testbed.random.to(torch.int32)

    def append() -> None:
        for cache in caches:
            flashinfer.append_paged_kv_cache(*rows, batch, positions, cache, append_to, indptr, last)

    yield KernelCase("flashinfer append_paged_kv_cache", append, "copy peak", 2)
