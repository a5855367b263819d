"""The machine's hardware and software; fails if SGLang is not a reviewed release or a server would not fit.

python -m bench.gpu.machine
"""

import argparse
import importlib.util
import os
import shutil

from bench import record
from sglang_april.adapter import preflight

GPU_GB, DISK_GB = 20, 10
"""Free memory that two servers with Qwen3-0.6B need, and free space for checkpoints and the disk tier."""
BACKENDS = ("flashinfer", "sgl_kernel", "aiter", "triton")


def main(given: list[str] | None = None) -> int:
    """Returns 0 if the pieces can run here."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.machine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--no-gpu", action="store_true", help="expect no GPU (rehearsal)")
    args = parser.parse_args(given)
    machine = record.machine()
    print(f"{machine['cpu']}, {machine['cores']} cores; {machine['os']}")
    print(", ".join(f"{name} {version}" for name, version in record.versions().items() if version))
    print("kernel packages:", ", ".join(name for name in BACKENDS if importlib.util.find_spec(name)))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    free = shutil.disk_usage(record.ROOT).free / 1e9
    print(f"{memory:.0f} GB of memory, {free:.0f} GB free on disk")
    preflight.check()
    print("SGLang is the release that was reviewed")
    problems = [] if free >= DISK_GB or args.no_gpu else [f"{free:.0f} GB are free on disk, and {DISK_GB} are needed"]
    if not args.no_gpu:
        problems += _gpu_problems()
    for problem in problems:
        print(f"problem: {problem}")
    return int(bool(problems))


def _gpu_problems() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return ["torch sees no GPU"]
    free, total = torch.cuda.mem_get_info()
    what = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    print(f"{torch.cuda.get_device_name()}, {what}, capability {capability}: {free / 1e9:.0f} of {total / 1e9:.0f} GB")
    return [] if free >= GPU_GB * 1e9 else [f"{free / 1e9:.0f} GB are free on the GPU, and {GPU_GB} are needed"]


if __name__ == "__main__":
    raise SystemExit(main())
