"""Recipes: each is consistent, has APRIL's settings, and states that it has not been run."""

import re
from pathlib import Path

import pytest

from trainer_bridge.args import config_parser, load
from trainer_bridge.cli import main
from trainer_bridge.config import Config, ConfigError
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
    assert config.kv == "recompute" or config.loss.proximal == "trainer", "kept KV gives no logprobs of old tokens"
    assert config.recompute_granularity == "full", "responses of 16,384 tokens"
    assert "has not been run" in path.read_text()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_dry_run_names_what_a_machine_lacks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(path), "--dry-run", "--save", "/dev/null/run"]) == 2
    names = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert names[:2] == ["hf_checkpoint", "prompt_data"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_says_how_to_get_its_model_and_data(path: Path) -> None:
    config, comment = load(path, {}), path.read_text().partition("hf_checkpoint:")[0]
    model, data = (line for line in comment.splitlines() if line.startswith(("# Model: ", "# Data: ")))
    assert re.search(
        rf"hf download [\w-]+/{Path(config.hf_checkpoint).name} --local-dir {config.hf_checkpoint}`", model
    )
    assert re.search(r'(--repo-type dataset |load\(")[\w-]+/[\w-]+', data)
    folder = re.search(r'(?:--local-dir |to_json\(")([\w./-]+?)[`"]', data)
    assert folder
    assert folder[1] in (config.prompt_data, str(Path(config.prompt_data).parent))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_trainer_and_engines_use_the_same_gpus(path: Path) -> None:
    """Eight GPUs, each with one trainer rank and one engine rank; no NCCL group has two ranks on one GPU."""
    config = load(path, {})
    engines = [config.engine_gpus(number, trainer_on_gpus=True) for number in range(config.engines)]
    assert [gpu for gpus in engines for gpu in gpus] == list(range(config.trainer_processes)) == list(range(8))
    assert f"--tp-size={config.server_gpus}" in config.server_flags
    assert config.transport == "tensor", "a group of trainer rank 0 and all engine ranks would have GPU 0 twice"


def test_engines_use_the_gpus_after_those_of_the_trainer() -> None:
    config = Config(hf_checkpoint="m", prompt_data="d", reward="r", trainer_processes=2, engines=2, server_gpus=2)
    assert config.transport == "auto", "the engines report GPUs that trainer rank 0 does not use"
    group = [0, *(gpu for i in range(2) for gpu in config.engine_gpus(i, trainer_on_gpus=True))]
    assert group == [0, 2, 3, 4, 5]
    assert config.engine_gpus(1, trainer_on_gpus=False) == range(2, 4)


def test_engines_of_the_page_use_the_gpus_that_it_names() -> None:
    page = (FOLDER.parent / "docs" / "training.md").read_text()
    (flags,) = re.findall(r"^april-train --config my\.yaml (.*--engines.*)$", page, re.MULTILINE)
    given = vars(config_parser().parse_args(flags.split()))
    config = load(None, {"hf_checkpoint": "m", "prompt_data": "d", **given})
    check(config)
    assert f"--tp-size={config.server_gpus}" in config.server_flags
    gpus = [
        range(config.trainer_processes),
        *(config.engine_gpus(i, trainer_on_gpus=True) for i in range(config.engines)),
    ]
    named = re.findall(r"(\d)-(\d)", page.partition(flags)[2].partition("\n\n")[2].partition("\n\n")[0])
    assert [(str(of[0]), str(of[-1])) for of in gpus] == named


def test_nccl_on_a_shared_gpu_is_refused() -> None:
    config = Config(hf_checkpoint="m", prompt_data="d", reward="r", colocate=True, push="distributed")
    with pytest.raises(ConfigError, match="push: distributed needs other GPUs"):
        check(config)
