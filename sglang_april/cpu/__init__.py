"""Platforms that SGLang finds by their entry points."""

import os

from sglang_april import config


def activate() -> str | None:
    """The portable CPU platform, where it was asked for and there is no GPU; None leaves SGLang to itself."""
    if not (config.is_active() or os.environ.get("SGLANG_APRIL_CPU") == "1"):
        return None

    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return None
    return "sglang_april.cpu.platform.TorchCpuPlatform"
