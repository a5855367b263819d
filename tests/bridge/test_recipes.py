"""Recipes: each is consistent, has APRIL's settings, and states that it has not been run."""

from pathlib import Path

import pytest

from trainer_bridge.args import load
from trainer_bridge.cli import main
from trainer_bridge.validate import check

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
def test_recipe_has_consistent_settings(path: Path) -> None:
    config = load(path, {})
    check(config)
    assert (config.rollout_batch_size * config.n_samples_per_prompt, config.global_batch_size) == (256, 256)
    assert (config.rollout_max_response_len, config.rollout_temperature, config.lr) == (16384, 0.8, 1e-6)
    assert (config.tensor_model_parallel_size, config.colocate, config.partial_rollout) == (2, True, True)
    assert config.recompute_granularity == "full", "responses of 16,384 tokens"
    assert "has not been run" in path.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dry_run_names_what_a_machine_lacks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(path), "--dry-run", "--save", "/dev/null/run"]) == 2
    names = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert names[:2] == ["hf_checkpoint", "prompt_data"]
