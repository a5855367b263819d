"""The CPU platform's KV pool: SGLang's, in other memory."""

import mmap

import pytest
import torch

from sglang_april.cpu.platform import TorchCpuPlatform
from sglang_april.cpu.pool import HugePagesPool, on_huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [100, 140_001])
def test_huge_pages_hold_equal_zeros(tokens: int, dtype: torch.dtype) -> None:
    zeros = torch.zeros(tokens, 2, 64, dtype=dtype)
    other = on_huge_pages(zeros)
    assert (other.shape, other.dtype, other.stride()) == (zeros.shape, zeros.dtype, zeros.stride())
    assert torch.equal(other, zeros)
    assert (other.data_ptr() == zeros.data_ptr()) is (zeros.nbytes < 32 << 20)


def test_platform_pool_uses_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[int] = []

    class Memory(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            requested.append(option)

    monkeypatch.setattr(mmap, "mmap", Memory)
    TorchCpuPlatform().get_mha_kv_pool_cls()(80_000, 1, torch.float32, 2, 64, 2, "cpu", enable_memory_saver=False)
    assert requested == [mmap.MADV_HUGEPAGE] * 4, "keys and values of two layers"


def test_a_pool_reads_what_was_written() -> None:
    pool = HugePagesPool(80_000, 1, torch.float32, 2, 64, 2, "cpu", enable_memory_saver=False)
    slots = torch.tensor([1, 79_999, 40_000])
    keys, values = torch.randn(2, 3, 2, 64)
    for buffer, given in ((pool.get_key_buffer(1), keys), (pool.get_value_buffer(1), values)):
        buffer[slots] = given
    assert torch.equal(pool.k_buffer[1][slots], keys)
    assert torch.equal(pool.get_value_buffer(1)[slots], values)
    assert pool.get_kv_size_bytes() == (80_001 * 2 * 64 * 4 * 2,) * 2
