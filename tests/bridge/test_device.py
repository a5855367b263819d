"""`device: cpu` on a machine with a GPU: trainer and Megatron-core leave the GPU alone."""

import subprocess
import sys
from pathlib import Path

from examples.tiny_model import make

ROOT = Path(__file__).parents[2]
TWO_STEPS_BESIDE_A_GPU = """
import sys
from pathlib import Path

import torch

torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.set_device = lambda _: sys.exit("a GPU was selected")

from tests.bridge.two_steps import settings, train_two_steps
from trainer_bridge.megatron.worker_group import make_trainer

folder = Path(sys.argv[1])
trainer = make_trainer(settings(folder / "model", device="cpu"))
steps = train_two_steps(trainer, folder)
trainer.load(folder / "saved")
trainer.close()
print([report.applied for report in steps.reports])
"""
"""In a process of its own, where torch reports a GPU that cannot be used."""


def test_cpu_trainer_beside_a_gpu(tmp_path: Path) -> None:
    make(tmp_path / "model", dtype="float32")
    ran = subprocess.run(
        [sys.executable, "-c", TWO_STEPS_BESIDE_A_GPU, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.splitlines()[-1] == "[True, True]"
