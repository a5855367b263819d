"""Packages that Megatron-core can do without."""

import subprocess
import sys
from pathlib import Path


def test_without_a_gpu_the_trainer_imports_beside_flash_mla(tmp_path: Path) -> None:
    """SGLang 0.5.23 installs it; without a driver, torch raises OSError for its library."""
    (tmp_path / "flash_mla.py").write_text("raise OSError('Could not load this library')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import trainer_bridge.megatron.model"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
