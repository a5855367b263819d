"""Every kernel compiles for every target without hardware: 128-bit accesses, nothing spilled, no stack.

Only compiled code can be checked here; bench/kernels.py measures speed on a GPU.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from april_kernels.kv_pages import int8_triton
from april_kernels.kv_pages import triton_impl as pages
from april_kernels.seeded_sampling import triton_impl as sampling

TARGETS = [GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)] + [
    GPUTarget("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")
]
TYPES = {
    "rows_ptr": "*i64",
    "slots_ptr": "*i64",
    "pages_ptr": "*i32",
    "sums_ptr": "*i64",
    "codes_ptr": "*i8",
    "scales_ptr": "*fp32",
    "probs_ptr": "*fp32",
    "keep_ptr": "*u8",
    "seeds_ptr": "*i64",
    "positions_ptr": "*i64",
    "scores_ptr": "*fp64",
    "best_ptr": "*i32",
    "tokens_ptr": "*i64",
    "probs_stride": "i32",
    "keep_stride": "i32",
}
"""Types of arguments by name; any other argument without a constexpr is an i32."""


def _move(page_tokens: int, row_bytes: int, *, pack: bool, checksum: bool = False, equal: bool = True) -> Any:
    """`equal`: K and V rows are of the same size, so the kernel knows it."""

    def launch(warp: int) -> tuple[dict[str, Any], int]:
        shape = pages.tile_shape(page_tokens * row_bytes // 4, warp)
        constants = {
            "PAGE_TOKENS": page_tokens,
            "ROW": row_bytes // 16 if equal else 0,
            "TILES": shape.tiles,
            "CHUNKS": shape.words // 4,
            "VEC": 4,
            "PACK": pack,
            "CHECKSUM": checksum,
        }
        return constants if checksum else {**constants, "sums_ptr": None}, shape.warps

    return pages.move_pages_kernel, launch


def _checksum(warp: int) -> tuple[dict[str, Any], int]:
    shape = pages.tile_shape(1 << 20, warp)
    return {"CHUNKS": shape.words // 4, "VEC": 4}, shape.warps


def _int8(heads: int, dim: int, element: Any, *, pack: bool) -> Any:
    def launch(warp: int) -> tuple[dict[str, Any], int]:
        block_rows, block_dim, warps = int8_triton.tile_shape(16 * heads, dim, warp)
        constants = {
            "PAGE_TOKENS": 16,
            "HEADS": heads,
            "DIM": dim,
            "ELEMENT": element,
            "ALIGNMENT": 16,
            "CODE_UNIT": 16,
            "BLOCK_ROWS": block_rows,
            "BLOCK_DIM": block_dim,
            "PACK": pack,
        }
        return constants, warps

    return int8_triton.int8_kernel, launch


def _sample(*, keep: bool) -> Any:
    constants = {"BLOCK": sampling.BLOCK} if keep else {"BLOCK": sampling.BLOCK, "keep_ptr": None}
    return sampling.block_best_kernel, lambda warp: (constants, sampling.NUM_WARPS)


class KernelCompilation(NamedTuple):
    kernel: Any
    launch: Callable[[int], tuple[dict[str, Any], int]]
    """Constants and warps, by warp size."""
    wide: frozenset[str] = frozenset({"load", "store"})
    """Which directions move data, hence must be 128 bits wide."""
    narrow: frozenset[tuple[str, int]] = frozenset()
    """Expected accesses of less than 64 bits. (Slots and the table are 64 bits wide; everything else is data.)"""


_SCALE_STORE, _SCALE_LOAD = frozenset({("store", 32)}), frozenset({("load", 32)})
_LOAD, _BEST_COLUMN = frozenset({"load"}), frozenset({("store", 32)})

CASES = {
    "pack": KernelCompilation(*_move(16, 2048, pack=True)),
    "pack, page of 1": KernelCompilation(*_move(1, 2048, pack=True)),
    "pack and checksum": KernelCompilation(*_move(64, 2048, pack=True, checksum=True)),
    "pack, K and V differ": KernelCompilation(*_move(16, 384, pack=True, checksum=True, equal=False)),
    "pack, MLA": KernelCompilation(*_move(16, 1152, pack=True)),
    "pack, fp8 head of 80": KernelCompilation(*_move(16, 80, pack=True)),
    "unpack": KernelCompilation(*_move(16, 2048, pack=False)),
    "unpack, K and V differ": KernelCompilation(*_move(16, 384, pack=False, equal=False)),
    "unpack, MLA": KernelCompilation(*_move(16, 1152, pack=False)),
    "checksum": KernelCompilation(pages.checksum_kernel, _checksum, _LOAD),
    "int8 pack": KernelCompilation(*_int8(8, 128, tl.bfloat16, pack=True), narrow=_SCALE_STORE),
    "int8 pack, MLA": KernelCompilation(*_int8(1, 576, tl.bfloat16, pack=True), narrow=_SCALE_STORE),
    "int8 unpack": KernelCompilation(*_int8(8, 128, tl.bfloat16, pack=False), narrow=_SCALE_LOAD),
    "int8 unpack, MLA": KernelCompilation(*_int8(1, 576, tl.bfloat16, pack=False), narrow=_SCALE_LOAD),
    "int8 pack, fp16": KernelCompilation(*_int8(4, 64, tl.float16, pack=True), narrow=_SCALE_STORE),
    "int8 unpack, fp16 heads of 96": KernelCompilation(*_int8(2, 96, tl.float16, pack=False), narrow=_SCALE_LOAD),
    "int8 pack, fp32": KernelCompilation(*_int8(8, 128, tl.float32, pack=True), narrow=_SCALE_STORE),
    "sampling": KernelCompilation(*_sample(keep=False), _LOAD, _BEST_COLUMN),
    # The mask has a byte per column: four columns of a thread are 32 bits where a warp has 64 lanes.
    "sampling with mask": KernelCompilation(*_sample(keep=True), _LOAD, _BEST_COLUMN | {("load", 32)}),
    "sampling, best of a row": KernelCompilation(
        sampling.row_best_kernel, lambda _: ({"BLOCKS": 128}, 4), frozenset(), frozenset({("load", 32)})
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile anew: a cached binary would prove nothing about this version of the compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(kernel: Any, constants: dict[str, Any], warps: int, target: GPUTarget) -> Any:
    """As a launch compiles it: pointers are 16-byte aligned unless the kernel declares otherwise, integers are any."""
    signature, attributes = {}, {}
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = TYPES.get(name, "i32")
        aligned = name.endswith("_ptr") and not parameter.do_not_specialize_on_alignment
        # Vocabularies are padded to a multiple of 16 columns; a launch sees it and compiles for it.
        if aligned or name in ("columns", "probs_stride", "keep_stride"):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options={"num_warps": warps})


def accesses(binary: Any, target: GPUTarget) -> Counter[tuple[str, int]]:
    """How often global memory is loaded from or stored to, by bits of one thread's access."""
    found: Counter[tuple[str, int]] = Counter()
    if target.backend == "cuda":
        pattern = r"\b(ld|st)\.global(?:\.(?!v\d|[bfsu]\d)[\w:]+)*(?:\.v(\d))?\.[bfsu](\d+)"
        for kind, count, bits in re.findall(pattern, binary.asm["ptx"]):
            found["load" if kind == "ld" else "store", int(count or 1) * int(bits)] += 1
        return found
    bits_of = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16, "dword": 32}
    pattern = r"\b(?:global|buffer|flat|scratch)_(load|store)_([a-z]+)(?:_d16\w*|x(\d))?\b"
    for kind, unit, count in re.findall(pattern, binary.asm["amdgcn"]):
        found[kind, int(count or 1) * bits_of[unit]] += 1
    return found


def left_registers(binary: Any, target: GPUTarget, folder: Path) -> dict[str, int]:
    """What did not fit into registers, as the compiler reports it; all zero is good."""
    if target.backend == "cuda":
        (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", str(folder / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
        pattern = r"\b(STACK|LOCAL):(\d+)"
        text, expected = report.stdout + report.stderr, 2
    else:
        pattern = r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s*(\d+)"
        text, expected = binary.asm["amdgcn"], 3
    found = {name: int(count) for name, count in re.findall(pattern, text)}
    assert len(found) == expected, "the compiler's report has changed"
    return found


def _target_name(target: GPUTarget) -> str:
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


@pytest.mark.parametrize("target", TARGETS, ids=_target_name)
@pytest.mark.parametrize("name", CASES)
def test_accesses_are_wide_and_nothing_spills(name: str, target: GPUTarget, tmp_path: Path) -> None:
    case = CASES[name]
    binary = compiled(case.kernel, *case.launch(target.warp_size), target)
    found = accesses(binary, target)
    assert case.wide <= {kind for kind, bits in found if bits == 128}, found
    assert {access for access in found if access[1] < 64} <= case.narrow, found
    assert not any(left_registers(binary, target, tmp_path).values())


@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[4]], ids=_target_name)
def test_narrow_accesses_are_detected(target: GPUTarget) -> None:
    """Positive control of the check above: rows that are not 16-byte aligned fail it."""
    kernel, launch = _move(16, 2048, pack=True)
    constants, warps = launch(target.warp_size)
    found = accesses(compiled(kernel, {**constants, "VEC": 1, "ROW": 512, "CHUNKS": 4096}, warps, target), target)
    assert {("load", 32), ("store", 32)} <= set(found), found
