"""What does not fit together in a configuration, and what of it can be checked without an engine."""

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_bridge.config import Config, ConfigError
from trainer_bridge.loss_settings import GROUP_BASELINE

NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_new_tokens": 0,
}
MODIFIES = (*NEUTRAL, "json_schema", "regex", "ebnf", "structural_tag", "logit_bias")
"""Sampling parameters that draw from another distribution than softmax(logits / temperature)."""
RATIO_LIMIT = 1e-4
"""How far the first ratio may be from 1 in float32."""


class RunError(RuntimeError):
    """Why a run ends before its last step, in one sentence; it may go on from its last checkpoint."""


def modified_sampling(config: Config) -> list[str]:
    """The parameters of a training round that make the trainer's ratios approximate."""
    params = config.rollout_params
    return [name for name in MODIFIES if name in params and params[name] not in (None, NEUTRAL.get(name, ...))]


def check(config: Config) -> None:
    """Raises ConfigError for what cannot be run as asked, naming the field."""
    modified = modified_sampling(config)
    if modified and not config.allow_modified_sampling:
        raise ConfigError(
            f"{', '.join(modified)}: tokens would be drawn from another distribution than their logprobs are of; "
            "allow_modified_sampling: true trains all the same"
        )
    try:
        config.loss.check_quota_unit(config.quota_unit)
        config.trainer  # noqa: B018 - made to be checked
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.advantage_estimator in GROUP_BASELINE and config.n_samples_per_prompt < 2:
        raise ConfigError("n_samples_per_prompt: a group's baseline needs at least two samples")
    if config.pool < config.rollout_batch_size:
        raise ConfigError("over_sampling_batch_size: must not be smaller than rollout_batch_size")
    if config.dynamic_sampling and config.quota_unit == "sample":
        raise ConfigError("dynamic_sampling: judges groups; quota_unit must be group")
    if config.kl_loss_coef > 0:
        raise ConfigError("kl_loss_coef: a reference model is not built; only 0 is accepted")
    if config.eval_interval is not None and config.eval_prompt_data is None:
        raise ConfigError("eval_interval: needs eval_prompt_data")
    if config.overlong_buffer_len >= config.rollout_max_response_len:
        raise ConfigError("overlong_buffer_len: must be smaller than rollout_max_response_len")
    if config.offload_trainer is True and not config.colocate:
        raise ConfigError("offload_trainer: makes room for an engine on the same GPU; it needs colocate: true")
    _check_strict(config)
    _check_ray(config)
    if max(len(config.servers), config.engines) > 1:
        _check_fleet(config)


def _check_fleet(config: Config) -> None:
    """What one quota over several engines cannot do."""
    if config.server is not None and config.engines > 1:
        raise ConfigError("engines: says how many servers are started; with server none is")
    if len(set(config.servers)) < len(config.servers):
        raise ConfigError("server: the same one twice")
    for name, needed in (("quota_unit", "group"), ("after_quota", "suspend"), ("quota_mode", "first")):
        if getattr(config, name) != needed:
            raise ConfigError(f"{name}: must be {needed} with several engines: the quota is counted outside of them")
    if config.staleness_bound == 0 and config.pool > config.rollout_batch_size:
        raise ConfigError(
            "over_sampling_batch_size: must be rollout_batch_size with several engines and a staleness bound of 0: "
            "they begin all that they are handed, and nothing may be left over"
        )


def _check_ray(config: Config) -> None:
    if not config.ray:
        if config.ray_address is not None:
            raise ConfigError("ray_address: needs ray: true")
        return
    try:
        importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError("ray: is not installed; pip install 'sglang-april[ray]' installs it") from error
    if config.colocate and config.trainer_device != "cpu":
        raise ConfigError(
            "colocate: trainer and engine cannot share GPUs under Ray; ray: false runs them on one machine"
        )


def _check_strict(config: Config) -> None:
    if not config.strict_on_policy:
        return
    if config.after_quota == "continue":
        raise ConfigError("after_quota: generating ahead is off-policy; strict_on_policy needs suspend")
    whole = config.rollout_batch_size * config.n_samples_per_prompt
    if config.quota_unit == "group" and config.global_batch_size not in (None, whole):
        raise ConfigError("global_batch_size: strict_on_policy takes one optimiser step per round")


def check_on_policy(steps: Sequence[Mapping[str, Any]], *, exact: bool) -> None:
    """Figures of a round's optimiser steps under `strict_on_policy`; raises RunError for what is not.

    `exact`: in float32 the trainer's logprobs are the engine's, and the first ratio is 1; with fewer bits rounding
    parts them.
    """
    for row in steps:
        if row and (row["off_policy_share"] or row["hybrid_share"]):
            raise RunError(f"strict_on_policy: {row['off_policy_share']:.2%} of the tokens are off-policy")
    if exact and steps and steps[0]:
        furthest = max(abs(steps[0][name] - 1) for name in ("ratio_max", "ratio_min"))
        if not furthest < RATIO_LIMIT:
            raise RunError(
                f"strict_on_policy: the first ratio is up to {furthest:.2g} from 1: engine and trainer differ about "
                "the tokens' logprobs; are both in float32?"
            )


def dry_run(config: Config) -> list[str]:
    """`check`, and then what can be looked at without an engine: one line for each thing seen or not there.

    Data, models and rewards that are not on this machine are named, not refused: a recipe is checked where it is
    written, not where it is run.
    """
    check(config)
    lines = [f"hf_checkpoint: {_model(Path(config.hf_checkpoint))}"]
    for name in ("prompt_data", "eval_prompt_data"):
        path = getattr(config, name)
        if path is not None:
            lines.append(f"{name}: {'found' if Path(path).exists() else 'not on this machine'} ({path})")
    place = (config.group_reward or config.reward).rpartition(":")[0]
    if not place:
        raise ConfigError("reward: must be module:function or file.py:function")
    found = Path(place).exists() if place.endswith(".py") else _importable(place)
    lines.append(f"reward: {'found' if found else 'not on this machine'} ({config.group_reward or config.reward})")
    samples = config.rollout_batch_size * (config.n_samples_per_prompt if config.quota_unit == "group" else 1)
    lines.append(f"a round delivers {samples} samples, {config.global_batch_size or samples} per optimiser step")
    return lines


def check_model(config: Config) -> None:
    """Raises ConfigError where there is no model to start from."""
    folder = Path(config.hf_checkpoint)
    if not (folder / "config.json").exists():
        raise ConfigError(f"hf_checkpoint: {folder} holds no config.json; it must be a Hugging Face folder")


def _model(path: Path) -> str:
    if not (path / "config.json").exists():
        return f"not on this machine ({path})"
    fields = json.loads((path / "config.json").read_text())
    return f"{fields.get('model_type')}, {fields.get('num_hidden_layers')} layers ({path})"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
