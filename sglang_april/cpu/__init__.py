"""The portable CPU platform: the real SGLang on any machine, for development and tests."""

import os

from sglang_april import config

CHOSEN_BY_PLATFORM = "SGLANG_APRIL_CPU_ATTENTION"
"""Environment variable for SGLang's processes: the platform chose the attention backend, not the user. SGLang 0.5.23
drops attributes of `ServerArgs` that are not fields."""


def activate() -> str | None:
    """Entry point of SGLang: the platform class if the plugin is active (or SGLANG_APRIL_CPU=1) and there is no GPU."""
    if not (config.is_active() or os.environ.get("SGLANG_APRIL_CPU") == "1"):
        return None

    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return None

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_april.cpu import processes

    HookRegistry.register(processes.TARGET, processes.fork, HookType.AFTER)
    return "sglang_april.cpu.platform.TorchCpuPlatform"
