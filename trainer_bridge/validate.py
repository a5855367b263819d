"""Validation of a configuration, and checks during a run."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_april.launch_checks import damage_of, no_tokenizer
from trainer_bridge.config import Config, ConfigError
from trainer_bridge.loss_settings import GROUP_BASELINE
from trainer_bridge.sampling import AGENT_PARAMETERS, FIELD_OF_PARAMETER, rollout_params

NEUTRAL_SAMPLING = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_new_tokens": 0,
}
MODIFYING_SAMPLING = (*NEUTRAL_SAMPLING, "json_schema", "regex", "ebnf", "structural_tag", "logit_bias")
"""Sampling parameters under which tokens are not drawn from softmax(logits / temperature)."""
MAX_ROUNDS_PER_STEP = 10
"""If a step needs more rounds, or the groups of more rounds, its reward always fails or is always the same."""
RATIO_TOLERANCE = 1e-4
"""Tolerance of the first ratio around 1 in float32."""


class RunError(RuntimeError):
    """A run ends before its last step, for this reason; it can be resumed from its last checkpoint."""


def modified_sampling(config: Config) -> list[str]:
    """The sampling parameters of a training round that make the trainer's ratios approximate."""
    params = rollout_params(config)
    return [
        name
        for name in MODIFYING_SAMPLING
        if name in params and params[name] not in (None, NEUTRAL_SAMPLING.get(name, ...))
    ]


def check(config: Config) -> None:
    """Raises: ConfigError: fields contradict each other or are not supported; the message names the field."""
    _check_sampling(config)
    try:
        config.loss.check_quota_unit(config.quota_unit)
        config.trainer  # noqa: B018 - its constructor validates
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_groups(config)
    if config.pool_size < config.rollout_batch_size:
        raise ConfigError("over_sampling_batch_size: must not be smaller than rollout_batch_size")
    if config.kl_loss_coef > 0:
        raise ConfigError("kl_loss_coef: only 0 is supported; there is no reference model")
    if config.eval_interval is not None and config.eval_prompt_data is None:
        raise ConfigError("eval_interval: needs eval_prompt_data")
    if config.overlong_buffer_len >= config.rollout_max_response_len:
        raise ConfigError("overlong_buffer_len: must be smaller than rollout_max_response_len")
    if config.offload_trainer is True and not config.colocate:
        raise ConfigError("offload_trainer: frees memory for an engine on the same GPU; it needs colocate: true")
    if config.colocate and config.push == "distributed" and config.trainer_device != "cpu":
        raise ConfigError("push: distributed needs other GPUs for the engine; with colocate use auto, tensor or disk")
    _check_strict_on_policy(config)
    _check_ray(config)
    _check_agent(config)
    if max(len(config.servers), config.engines) > 1:
        _check_engines(config)


def _check_sampling(config: Config) -> None:
    """Raises: ConfigError: sampling parameters contradict fields, or change the distribution of tokens unasked."""
    for name, field in FIELD_OF_PARAMETER.items():
        if name in config.sampling_params:
            raise ConfigError(f"sampling_params: {name} has a field of its own, {field}")
    modified = modified_sampling(config)
    if modified and not config.allow_modified_sampling:
        raise ConfigError(
            f"{', '.join(modified)}: the logprobs would not be those of the distribution that tokens are drawn from; "
            "allow_modified_sampling: true permits it"
        )


def _check_groups(config: Config) -> None:
    """Raises: ConfigError: groups are too small, or not whole, for what is computed over them."""
    if config.loss.algorithm in GROUP_BASELINE and config.n_samples_per_prompt < 2:
        raise ConfigError("n_samples_per_prompt: a group's baseline needs at least two samples")
    if config.dynamic_sampling and config.quota_unit == "sample":
        raise ConfigError("dynamic_sampling: needs quota_unit: group, because it judges groups")
    if config.group_reward and config.quota_unit == "sample":
        raise ConfigError("group_reward: needs quota_unit: group, because it scores groups")
    if config.dynamic_sampling and config.n_samples_per_prompt < 2:
        raise ConfigError("dynamic_sampling: needs n_samples_per_prompt of at least 2: one reward never differs")


def _check_engines(config: Config) -> None:
    """Raises: ConfigError: a setting is not supported with several engines."""
    if config.server is not None and config.engines > 1:
        raise ConfigError("engines: is the number of servers to start; with server none is started")
    if len(set(config.servers)) < len(config.servers):
        raise ConfigError("server: contains the same URL twice")
    for name, needed in (("quota_unit", "group"), ("after_quota", "suspend"), ("quota_mode", "first")):
        if getattr(config, name) != needed:
            raise ConfigError(
                f"{name}: must be {needed} with several engines, because the quota is counted over all of them"
            )
    if config.staleness_bound == 0 and config.pool_size > config.rollout_batch_size:
        raise ConfigError(
            "over_sampling_batch_size: must be rollout_batch_size with several engines and a staleness bound of 0: "
            "each engine starts all prompts that it gets, and none may be carried over"
        )


def _check_agent(config: Config) -> None:
    """Raises: ConfigError: a setting is not supported with an agent function."""
    if config.agent is None:
        return
    for name in ("reward", "group_reward"):
        if getattr(config, name) != next(f.default for f in msgspec.structs.fields(Config) if f.name == name):
            raise ConfigError(f"{name}: an agent function returns the reward itself")
    if unknown := config.sampling_params.keys() - AGENT_PARAMETERS:
        raise ConfigError(
            f"sampling_params: {min(unknown)}: is not possible with an agent, whose client calls SGLang's chat "
            f"completions; possible are {', '.join(sorted(AGENT_PARAMETERS))}"
        )
    if config.quota_mode != "first":
        raise ConfigError("quota_mode: must be first with an agent; rounds of trajectories have no cohorts")
    if config.overlong_buffer_len:
        raise ConfigError(
            "overlong_buffer_len: does not apply to trajectories, because an agent function sets the reward"
        )
    if max(len(config.servers), config.engines) > 1:
        raise ConfigError("agent: needs one engine; a quota of trajectories over several engines is not supported")
    if config.staleness_bound == 0 and config.pool_size > config.rollout_batch_size:
        raise ConfigError(
            "over_sampling_batch_size: must be rollout_batch_size with an agent and a staleness bound of 0: all agents "
            "of the pool start, and none may be carried over"
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


def _check_strict_on_policy(config: Config) -> None:
    if not config.strict_on_policy:
        return
    if config.after_quota == "continue":
        raise ConfigError("after_quota: strict_on_policy needs suspend, because samples generated ahead are off-policy")
    round_samples = config.rollout_batch_size * config.n_samples_per_prompt if config.quota_unit == "group" else None
    if config.global_batch_size not in (None, round_samples):
        raise ConfigError("global_batch_size: strict_on_policy takes one optimiser step per round")


def check_unusable(groups: int, config: Config, problem: str) -> None:
    """Check how many groups of a round cannot be trained on; `problem` is about the last one. Raises: RunError."""
    if groups > MAX_ROUNDS_PER_STEP * config.rollout_batch_size:
        raise RunError(f"{groups} groups of one round cannot be trained on. The last one: {problem}")


def check_on_policy(steps: Sequence[Mapping[str, Any]], *, exact: bool) -> None:
    """Check the loss statistics of a round's optimiser steps under `strict_on_policy`.

    `exact`: also check the first ratio. In float32 the logprobs of trainer and engine agree, so it is 1; in bfloat16
    rounding makes them differ. Raises: RunError.
    """
    for row in steps:
        if row and (row["off_policy_share"] or row["hybrid_share"]):
            raise RunError(f"strict_on_policy: {row['off_policy_share']:.2%} of the tokens are off-policy")
    if exact and steps and steps[0]:
        deviation = max(abs(steps[0][name] - 1) for name in ("ratio_max", "ratio_min"))
        if not deviation < RATIO_TOLERANCE:
            raise RunError(
                f"strict_on_policy: the first ratio is up to {deviation:.2g} from 1: the logprobs of engine "
                "and trainer differ; are both in float32?"
            )


def check_model(config: Config) -> None:
    """Raises: ConfigError: `hf_checkpoint` is not a model folder, or is damaged."""
    folder = Path(config.hf_checkpoint)
    if not (folder / "config.json").exists():
        raise ConfigError(f"hf_checkpoint: {folder} contains no config.json; it must be a Hugging Face folder")
    flags = " ".join(config.server_flags)
    own = config.server is None and "--tokenizer-path" not in flags and "--skip-tokenizer-init" not in flags
    if damage := damage_of(str(folder)) or (no_tokenizer(str(folder)) if own else None):
        raise ConfigError(f"hf_checkpoint: {damage.removeprefix('--model-path ')}")
