"""int8 pages: the kernel against the reference, and the error that the docstring states. Started by test_kernels.py."""

import pytest
import torch

from april_kernels.kv_pages import PlaneTable, int8, int8_layout, int8_reference, int8_triton, triton_impl
from april_kernels.kv_pages import checksum as page_checksum
from april_kernels.kv_pages.int8_layout import Int8Layout
from tests.kernels.pools import choose_slots, huge

SHAPES = {
    "bf16 8x128": (torch.bfloat16, ((8, 128), (8, 128))),
    "fp16 K 2x96, V 2x64": (torch.float16, ((2, 96), (2, 64), (2, 96), (2, 64))),
    "fp32 3x20": (torch.float32, ((3, 20), (3, 20))),
    "bf16 MLA 576": (torch.bfloat16, ((1, 576), (1, 576))),
}
SLOTS, TOKENS = 60, 21


def normal_pool(shape: str, device: str, seed: int = 0) -> Int8Layout:
    dtype, planes = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.randn(SLOTS, *plane, generator=generator).to(device, dtype) for plane in planes]
    return Int8Layout(PlaneTable.of(buffers))


@pytest.mark.parametrize(("page_tokens", "tokens"), [(1, 6), (16, TOKENS)])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_and_reference_agree(shape: str, page_tokens: int, tokens: int, device: str) -> None:
    layout = normal_pool(shape, device)
    buffers = layout.table.buffers
    buffers[0][:4] = 0
    buffers[0][4, 0, 0] = 3e4
    slots = choose_slots("holes", tokens, SLOTS, device)
    expected = int8.pack(layout, slots, page_tokens)
    pages = torch.full_like(expected, 0x7F7F7F7F)
    pages[:, layout.used_words(page_tokens) :] = 0
    int8_triton.quantize(layout, slots, page_tokens, pages)
    codes, scales = int8_layout.sections(layout, pages, page_tokens)
    expected_codes, expected_scales = int8_layout.sections(layout, expected, page_tokens)
    assert torch.equal(scales, expected_scales)
    # A product may be fused with the addition before it is rounded: ties, and only they, may fall the other way.
    difference = (codes.to(torch.int16) - expected_codes.to(torch.int16)).abs()
    assert int(difference.max()) <= 1
    assert float(difference.to(torch.float32).mean()) < 1e-3

    actual, expected_pool = normal_pool(shape, device, seed=1), normal_pool(shape, device, seed=1)
    int8_triton.dequantize(actual, slots, page_tokens, expected)
    int8_reference.dequantize(expected_pool, slots, page_tokens, expected)
    for mine, their in zip(actual.table.buffers, expected_pool.table.buffers, strict=True):
        # The interpreter truncates float32 to bfloat16 where a GPU rounds: one unit in the last place.
        torch.testing.assert_close(mine, their, rtol=2**-7 if mine.dtype == torch.bfloat16 else 1e-3, atol=1e-30)


@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_within_documented_bound(shape: str, device: str) -> None:
    layout = normal_pool(shape, device)
    before = [buffer.to(torch.float32) for buffer in layout.table.buffers]
    slots = choose_slots("random", TOKENS, SLOTS, device)
    pages = int8.pack(layout, slots, 16)
    for buffer in layout.table.buffers:
        buffer.zero_()
    int8.unpack(layout, slots, 16, pages)
    rounding = torch.finfo(layout.dtype).eps / 2
    for buffer, original in zip(layout.table.buffers, before, strict=True):
        x, y = original[slots], buffer[slots].to(torch.float32)
        bound = x.abs().amax(dim=-1, keepdim=True) / 254 + rounding * x.abs().amax()
        assert bool(((x - y).abs() <= bound * 1.0001).all())
        if layout.shapes[0][1] == 128:
            relative = float((x - y).square().mean().sqrt() / x.square().mean().sqrt())
            assert 0.006 < relative < 0.007


def test_int8_pages_are_deterministic_and_checksummed(device: str) -> None:
    layout = normal_pool("fp32 3x20", device)
    slots = choose_slots("holes", TOKENS, SLOTS, device)
    dirty = torch.full((2, layout.page_words(16)), 0x7F7F7F7F, dtype=torch.int32, device=device)
    first, second = int8.pack(layout, slots, 16), int8.pack(layout, slots, 16, out=dirty)
    assert torch.equal(first, second)
    sums = page_checksum(first)
    first[1, -1] ^= 1 << 31
    assert (page_checksum(first) != sums).tolist() == [False, True]


def test_size(device: str) -> None:
    layout = normal_pool("bf16 8x128", device)
    assert round(layout.page_words(16) / layout.table.page_words(16), 2) == 0.52


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([torch.zeros(4, 1, 8, dtype=torch.float8_e4m3fn)], "one dtype"),
        ([torch.zeros(4, 1, 8), torch.zeros(4, 1, 8, dtype=torch.float16)], "one dtype"),
        ([torch.zeros(4, 1, 6)], "multiple of 4"),
    ],
)
def test_unsupported_pools_are_refused(buffers: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int8Layout(PlaneTable.of(buffers))


def test_kernel_warps() -> None:
    """A warp of 64 has work for all its threads in every tile that is large enough."""
    assert int8_triton.tile_shape(128, 128, 64) == (32, 128, 4)
    assert int8_triton.tile_shape(1, 576, 64) == (1, 1024, 1)
    assert triton_impl.tile_shape(10, 64).warps == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pool_and_pages_beyond_2_31_bytes(dtype: torch.dtype, device: str) -> None:
    """The last slots and the last page lie beyond 2**31 elements of a plane, and 2**31 words."""
    heads, dim, page_tokens = 2, 512, 2
    slots_in_all = 2**31 // (heads * dim) + 16
    plane = huge(slots_in_all * heads * dim, device).view(dtype)[: slots_in_all * heads * dim]
    layout = Int8Layout(PlaneTable.of([plane.view(slots_in_all, heads, dim)]))
    slots = torch.tensor([slots_in_all - 1, 3, -1, -1, 5, slots_in_all - 2], device=device)
    rows = layout.table.buffers[0]
    rows[slots[slots >= 0]] = torch.linspace(-2, 2, 4 * heads * dim, device=device).view(4, heads, dim).to(dtype)
    stride = 2**31 // 2 + 4096
    pages = huge(3 * stride, device).view(3, stride)[:, : layout.page_words(page_tokens)]
    int8_triton.quantize(layout, slots, page_tokens, pages)
    expected = int8_reference_pages(layout, slots, page_tokens)
    codes, scales = int8_layout.sections(layout, pages, page_tokens)
    expected_codes, expected_scales = int8_layout.sections(layout, expected, page_tokens)
    assert torch.equal(scales, expected_scales)
    assert int((codes.to(torch.int16) - expected_codes.to(torch.int16)).abs().max()) <= 1
    before = rows[slots[slots >= 0]].float()
    rows[slots[slots >= 0]] = 0
    int8_triton.dequantize(layout, slots, page_tokens, pages)
    torch.testing.assert_close(rows[slots[slots >= 0]].float(), before, rtol=0, atol=2 / 127)


def int8_reference_pages(layout: Int8Layout, slots: torch.Tensor, page_tokens: int) -> torch.Tensor:
    pages = torch.zeros(
        len(slots) // page_tokens, layout.page_words(page_tokens), dtype=torch.int32, device=slots.device
    )
    int8_reference.quantize(layout, slots, page_tokens, pages)
    return pages
