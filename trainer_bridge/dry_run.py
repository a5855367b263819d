"""`april-train --dry-run`: checks the model, data, reward and folders of a configuration, without an engine."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

from trainer_bridge.config import Config, ConfigError
from trainer_bridge.data import PromptData, read_rows
from trainer_bridge.megatron.shapes import ModelShape, UnsupportedModelError
from trainer_bridge.memory import estimate
from trainer_bridge.rewards import load_function
from trainer_bridge.validate import check, check_model


def dry_run(config: Config) -> list[str]:
    """One line per part of the run that was checked.

    Raises:
        ConfigError: some part is missing or invalid; the message has one line for each.
    """
    check(config)
    parts: dict[str, Callable[[Config], str]] = {"hf_checkpoint": _model, "prompt_data": _data}
    if config.eval_prompt_data is not None:
        parts["eval_prompt_data"] = _eval_data
    if config.agent is not None:
        parts["agent"] = _agent
    else:
        parts["group_reward" if config.group_reward is not None else "reward"] = _reward
    parts["save"] = _folder
    lines, problems = [], []
    for name, part in parts.items():
        try:
            lines.append(f"{name}: {part(config)}")
        except (ConfigError, UnsupportedModelError, OSError) as error:
            problems.append(f"{name}: {str(error).removeprefix(f'{name}: ').removeprefix('prompt_data: ')}")
    if problems:
        raise ConfigError("\n".join(problems))
    samples = config.rollout_batch_size * (config.n_samples_per_prompt if config.quota_unit == "group" else 1)
    kind = "samples" if config.agent is None else "trajectories"
    batch = f"a round delivers {samples} {kind}, {config.global_batch_size or samples} per optimiser step"
    return [*lines, _memory(config), batch]


def _model(config: Config) -> str:
    check_model(config)
    if not any(Path(config.hf_checkpoint).glob("*.safetensors")):
        raise ConfigError(f"{config.hf_checkpoint} has no *.safetensors, which the trainer reads")
    shape = ModelShape.read(Path(config.hf_checkpoint))
    shape.check_tensor_parallel(config.tensor_model_parallel_size)
    return f"{shape.family}, {shape.layers} layers ({config.hf_checkpoint})"


def _memory(config: Config) -> str:
    """Memory of a trainer rank; docs/training.md describes what the estimate covers."""
    settings = config.trainer
    rank = estimate(
        ModelShape.read(Path(config.hf_checkpoint)),
        tensor_parallel=settings.tensor_model_parallel_size,
        data_parallel=settings.world_size // settings.tensor_model_parallel_size,
        tokens=config.max_tokens_per_gpu,
        width=2 if config.train_dtype == "bfloat16" else 4,
    )
    parts = ("weights", "gradients", "optimizer", "activations")
    sizes = ", ".join(f"{name} {getattr(rank, name) / 1e9:.3g}" for name in parts)
    more = "" if config.recompute_granularity == "full" else "; more without recompute_granularity: full"
    return f"memory of a trainer rank, estimated: {rank.total / 1e9:.3g} GB ({sizes}{more})"


def _data(config: Config) -> str:
    return _first_prompt(config.prompt_data, config)


def _eval_data(config: Config) -> str:
    return _first_prompt(str(config.eval_prompt_data), config)


def _first_prompt(path: str, config: Config) -> str:
    data = PromptData(read_rows(path), config)
    (prompt,) = data.take(1)
    return f"{len(data)} rows ({path}); the first: {str(prompt.content)[:60]!r}, label {str(prompt.label)[:20]!r}"


def _reward(config: Config) -> str:
    return _function(config.group_reward or config.reward)


def _agent(config: Config) -> str:
    path = _function(str(config.agent))
    if not inspect.iscoroutinefunction(load_function(path)):
        raise ConfigError(f"{path} is not an async function")
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("the package openai is not installed; pip install 'sglang-april[trainer]' installs it")
    return path


def _function(path: str) -> str:
    if ":" not in path:
        raise ConfigError(f"must be module:function or file.py:function, not {path!r}")
    try:
        function = load_function(path)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{path}: {error!r}") from error
    if not callable(function):
        raise ConfigError(f"{path} is not a function")
    return path


def _folder(config: Config) -> str:
    Path(config.save).mkdir(parents=True, exist_ok=True)
    return config.save
