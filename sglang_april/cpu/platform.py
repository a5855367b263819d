"""A portable PyTorch CPU platform, so that the real engine runs on any machine.

SGLang's own CPU mode needs kernels built for the processor. This one needs PyTorch alone: native forward, the
`torch_native` attention, the ordinary KV pools. It is meant for development and tests, not for speed.

SGLang resolves the platform while it is being imported, so this module imports most of SGLang lazily.
"""

import functools
import os
from typing import Any

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import CpuArchEnum, PlatformEnum

from sglang_april.cpu import CHOSEN_BY_PLATFORM

DEFAULT_TOTAL_TOKENS = 65_536
DEFAULT_RUNNING_REQUESTS = 64


class TorchCpuPlatform(CpuSRTPlatform):
    """SGLang's platform interface, implemented with portable PyTorch."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose settings that work on a CPU where SGLang's defaults would not."""
        # SGLang has already filled in its own default.
        upstream_default = "torch_native" if self.cpu_arch is CpuArchEnum.ARM else "intel_amx"
        if server_args.attention_backend in (None, upstream_default):
            server_args.attention_backend = "torch_native"
            os.environ[CHOSEN_BY_PLATFORM] = "1"
        else:
            os.environ.pop(CHOSEN_BY_PLATFORM, None)
        check_pace(server_args.attention_backend)
        # xgrammar allocates its mask through CUDA.
        server_args.grammar_backend = server_args.grammar_backend or "llguidance"
        server_args.disable_custom_all_reduce = True
        # The idle loop would otherwise spin on a core that the HTTP process needs.
        server_args.sleep_on_idle = True
        # SGLang sizes the pool for a GPU's memory; here the memory is shared with everything else.
        server_args.max_total_tokens = server_args.max_total_tokens or DEFAULT_TOTAL_TOKENS
        server_args.max_running_requests = server_args.max_running_requests or DEFAULT_RUNNING_REQUESTS
        # The first grammar mask would be compiled by torch.compile: half a minute, and a C++ compiler, for a few rows.
        if not server_args.enable_torch_compile:
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        # The NCCL that comes with PyTorch needs a GPU; without a library SGLang uses gloo.
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent")
        if server_args.tp_size > 1:
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_by_rank(server_args.tp_size))

    def get_device(self, local_rank: int | None = None) -> str:  # noqa: ARG002 - SGLang's signature
        """The device's name, not a device object: without `--device` SGLang splits this as the flag's value."""
        return "cpu"

    def init_backend(self) -> None:
        """Install the decode attention and the sampler, in each worker."""
        from sglang_april.cpu import attention, sampling

        attention.install()
        sampling.install()
        default_to_cpu()

    def get_default_attention_backend(self) -> str:
        """PyTorch's scaled dot product attention."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's ordinary pool, on huge pages."""
        from sglang_april.cpu.pool import HugePagesPool

        return HugePagesPool

    def get_mla_kv_pool_cls(self) -> type:
        """SGLang's ordinary pool."""
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        return MLATokenToKVPool

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """The pool of a kind; SGLang 0.5.22 and later ask here, earlier ones the two methods above."""
        pools = {"mha": self.get_mha_kv_pool_cls, "mla": self.get_mla_kv_pool_cls}
        return pools[kind]() if kind in pools else None

    def get_paged_allocator_cls(self) -> Any:
        """The constructor of an allocator that fits the page size."""
        from sglang_april.cpu.allocator import make_allocator

        return make_allocator

    def get_dispatch_key_name(self) -> str:
        """`forward_native` of every operator."""
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:  # noqa: ARG002 - SGLang's signature
        """No compilation."""
        return "eager"


def default_to_cpu() -> None:
    """Make `torch.get_device_module()` that of the CPU.

    torch 2.14 built with CUDA returns CUDA's also where there is no GPU, and SGLang, which waits for that device as it
    releases memory, would fail.
    """
    import torch

    stock = torch.get_device_module
    if stock() is torch.cpu:
        return

    @functools.wraps(stock)  # torch.compile reads `__wrapped__`
    def get_device_module(device: Any = None) -> Any:
        return stock("cpu" if device is None else device)

    torch.get_device_module = get_device_module


def check_pace(attention_backend: str) -> None:
    """End the start with one sentence if `--april-cpu-pace` names no table, or cannot take effect."""
    from sglang_april import config
    from sglang_april.cpu import pace

    try:
        table = pace.chosen()
    except config.ConfigError as error:
        raise SystemExit(f"sglang-april: {error}") from None
    if table is not None and attention_backend != "torch_native":
        raise SystemExit("sglang-april: --april-cpu-pace needs --attention-backend torch_native")


def cores_by_rank(ranks: int) -> str:
    """Cores per rank in SGLang's format (`0,1|2,3`); ranks share cores if there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    each = max(1, len(cores) // ranks)
    starts = [(rank * each) % len(cores) for rank in range(ranks)]
    return "|".join(",".join(map(str, cores[start : start + each])) for start in starts)
