"""`make gpu GPU_ARGS=--rehearse`, its short form: the machine, resume from every tier, the kernels, step times.

The other pieces are commands that test_bench_rollout.py and test_demo.py run on shared servers.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import record
from bench.gpu.pieces import GpuSetting, pieces
from examples.april_demo.server import has_gpu
from sglang_april.cpu import pace

SHORT = ["machine", "resume", "kernels", "pace"]


@pytest.mark.skipif(has_gpu(), reason="a rehearsal is for machines without a GPU")
def test_short_rehearsal_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--out", str(tmp_path), "--only", *SHORT]
    done = subprocess.run(command, cwd=record.ROOT, capture_output=True, text=True, check=False)
    logs = "\n".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: status["state"] for name, status in state.items()} == dict.fromkeys(
        ["machine", "resume default", "kernels", "pace"], "passed"
    )
    text = (tmp_path / "page.md").read_text()
    every = pieces(GpuSetting("cpu", tmp_path, tmp_path))
    assert f"4 of {len(every)} pieces passed" in text
    for tier in ("device", "host", "disk", "none"):
        assert f"| default | {tier} |" in text
    assert pace.load(str(tmp_path / "pace.json")).name.endswith("measured")
