"""Sampling parameters of requests: training rounds, evaluations and agents."""

from typing import Any

from trainer_bridge.config import Config

FIELD_OF_PARAMETER = {
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_new_tokens": "rollout_max_response_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
    "sampling_seed": "rollout_seed",
}
"""Sampling parameters that have a field of their own. The trainer reads some of these fields, so `sampling_params` must
not contradict them."""

AGENT_PARAMETERS = {
    "custom_params": "custom_params",
    "ebnf": "ebnf",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "logit_bias": "logit_bias",
    "min_new_tokens": "min_tokens",
    "min_p": "min_p",
    "no_stop_trim": "no_stop_trim",
    "presence_penalty": "presence_penalty",
    "regex": "regex",
    "repetition_penalty": "repetition_penalty",
    "skip_special_tokens": "skip_special_tokens",
    "stop_regex": "stop_regex",
}
"""Keys of `sampling_params` that are possible with an agent, and their names in SGLang's chat completions (SGLang's
`ChatCompletionRequest`), which ignore what they do not know."""


def rollout_params(config: Config) -> dict[str, Any]:
    """Sampling parameters of a training round, by SGLang's names."""
    params = _params(
        config, config.rollout_temperature, config.rollout_top_p, config.rollout_top_k, config.rollout_max_response_len
    )
    return params | config.sampling_params


def evaluation_params(config: Config) -> dict[str, Any]:
    """Sampling parameters of an evaluation, by SGLang's names."""
    length = config.eval_max_response_len or config.rollout_max_response_len
    return _params(config, config.eval_temperature, config.eval_top_p, -1, length)


def agent_params(config: Config, *, evaluation: bool = False) -> dict[str, Any]:
    """Sampling parameters for `client.chat.completions.create` in an agent.

    Neutral values are explicit, because SGLang's OpenAI routes take parameters that a request omits from the model's
    `generation_config.json`, which may change the distribution behind the logprobs.
    """
    params = evaluation_params(config) if evaluation else rollout_params(config)
    extra = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, **params}
    known = {
        "seed": extra.pop("sampling_seed"),
        "temperature": extra.pop("temperature"),
        "top_p": extra.pop("top_p", 1.0),
        "max_tokens": extra.pop("max_new_tokens"),
    }
    if "stop" in extra:
        known["stop"] = extra.pop("stop")
    return {**known, "extra_body": {AGENT_PARAMETERS.get(name, name): value for name, value in extra.items()}}


def _params(config: Config, temperature: float, top_p: float, top_k: int, length: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": temperature,
        "max_new_tokens": length,
        "sampling_seed": config.rollout_seed,
    }
    if top_p < 1:
        params["top_p"] = top_p
    if top_k != -1:
        params["top_k"] = top_k
    if config.rollout_stop:
        params["stop"] = config.rollout_stop
    if config.rollout_stop_token_ids:
        params["stop_token_ids"] = config.rollout_stop_token_ids
    return params
