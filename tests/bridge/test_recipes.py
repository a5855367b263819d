"""Recipes: each passes the dry run, has APRIL's settings, and states that it has not been run."""

from pathlib import Path

import pytest

from trainer_bridge.args import load
from trainer_bridge.cli import main

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_recipes_cover_the_algorithms_models_and_datasets() -> None:
    configs = [load(path, {}) for path in RECIPES]
    assert {config.loss.algorithm for config in configs} == {"grpo", "dapo", "gspo"}
    models = " ".join(config.hf_checkpoint for config in configs)
    assert all(name in models for name in ("Qwen3-4B", "DeepSeek-R1-Distill-Qwen-1.5B", "GLM-4-9B"))
    data = " ".join(config.prompt_data for config in configs)
    assert all(name in data for name in ("dapo-math-17k", "deepscaler", "DeepMath-103K"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_passes_the_dry_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(path), "--dry-run"]) == 0
    assert "a round delivers 256 samples, 256 per optimiser step" in capsys.readouterr().out
    config = load(path, {})
    assert (config.rollout_max_response_len, config.rollout_temperature, config.lr) == (16384, 0.8, 1e-6)
    assert (config.tensor_model_parallel_size, config.colocate, config.partial_rollout) == (2, True, True)
    assert "has not been run" in path.read_text()
