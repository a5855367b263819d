"""Unsupported configurations, as data: a row that applies ends the start with one sentence (`fail-closed`).

Unsupported requests (for example for hidden states) are answered with 400 by `http/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Environment = Mapping[str, str]


@dataclass(frozen=True)
class Refusal:
    """`what` is refused if `applies` returns true, because of `why`."""

    what: str
    applies: Callable[[Any, Environment], bool]
    why: str

    def sentence(self) -> str:
        """The one sentence on stderr."""
        return f"{self.what} cannot be used with partial rollouts, because {self.why}."


def _set(field: str) -> Callable[[Any, Environment], bool]:
    return lambda args, _: bool(getattr(args, field))


def _above_one(field: str) -> Callable[[Any, Environment], bool]:
    return lambda args, _: (getattr(args, field) or 1) > 1


def _true(env: Environment, name: str) -> bool:
    return env.get(name, "").strip().lower() in ("1", "true", "yes", "y", "t", "on")


def _env(name: str) -> Callable[[Any, Environment], bool]:
    return lambda _, env: _true(env, name)


def _timeout_with_tp(name: str) -> Callable[[Any, Environment], bool]:
    def applies(args: Any, env: Environment) -> bool:
        try:
            seconds = float(env.get(name) or -1)
        except ValueError:
            return False
        return seconds > 0 and (args.tp_size or 1) > 1

    return applies


KEYED_BY_TOKENS = "such a cache may find KV by tokens alone, and give one policy's to another"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("--speculative-algorithm", _set("speculative_algorithm"), "its drafts are not kept across a suspend"),
    Refusal("--enable-dp-attention", _set("enable_dp_attention"), "rounds are not divided among attention ranks yet"),
    Refusal("--dp-size above 1", _above_one("dp_size"), "SGLang's controller would hand each round to every replica"),
    Refusal(
        "--tokenizer-worker-num above 1",
        _above_one("tokenizer_worker_num"),
        "the extra HTTP workers do not load plugins and would lack the rollout routes",
    ),
    Refusal("--pp-size above 1", _above_one("pp_size"), "a suspend does not reach the micro-batches in flight"),
    Refusal(
        "--disaggregation-mode",
        lambda args, _: args.disaggregation_mode not in (None, "null"),
        "a partial's KV would have to move between prefill and decode servers",
    ),
    Refusal("--enable-hisparse", _set("enable_hisparse"), "its KV lies in two pools, which a suspend does not cover"),
    Refusal(
        "--enable-streaming-session", _set("enable_streaming_session"), "a session's KV belongs to no single sample"
    ),
    Refusal(
        "--enable-session-radix-cache", _set("enable_session_radix_cache"), "a session's KV belongs to no single sample"
    ),
    Refusal(
        "--enable-hierarchical-cache",
        _set("enable_hierarchical_cache"),
        "its host copies of the radix tree were never tried beside ours",
    ),
    Refusal("--enable-lmcache", _set("enable_lmcache"), KEYED_BY_TOKENS),
    Refusal("--enable-flexkv", _set("enable_flexkv"), KEYED_BY_TOKENS),
    Refusal("--radix-cache-backend", _set("radix_cache_backend"), KEYED_BY_TOKENS),
    Refusal("--dcp-size above 1", _above_one("dcp_size"), "a partial's pages would be spread over ranks"),
    Refusal("--enable-pdmux", _set("enable_pdmux"), "its event loop passes the hooks by"),
    Refusal("--dllm-algorithm", _set("dllm_algorithm"), "a diffusion model does not write token after token"),
    Refusal("--is-embedding", _set("is_embedding"), "an embedding server generates nothing"),
    Refusal("--encoder-only", _set("encoder_only"), "an encoder generates nothing"),
    Refusal("--smg-grpc-mode", _set("smg_grpc_mode"), "a server without HTTP has no rollout routes"),
    Refusal("--grpc-mode", _set("grpc_mode"), "a server without HTTP has no rollout routes"),
    Refusal("--use-ray", _set("use_ray"), "the hooks were never tried in schedulers that Ray starts"),
    Refusal(
        "--rl-on-policy-target",
        _set("rl_on_policy_target"),
        "it changes what a logprob means, and behaviour logprobs must stay what was sampled from",
    ),
    Refusal(
        "SGLANG_RETURN_ORIGINAL_LOGPROB",
        _env("SGLANG_RETURN_ORIGINAL_LOGPROB"),
        "it changes what a logprob means, and behaviour logprobs must stay what was sampled from",
    ),
    Refusal("SGLANG_RUST_SERVER", _env("SGLANG_RUST_SERVER"), "its front end has no rollout routes"),
    Refusal(
        "SGLANG_REQ_WAITING_TIMEOUT with --tp-size above 1",
        _timeout_with_tp("SGLANG_REQ_WAITING_TIMEOUT"),
        "a clock on each rank would let ranks decide differently",
    ),
    Refusal(
        "SGLANG_REQ_RUNNING_TIMEOUT with --tp-size above 1",
        _timeout_with_tp("SGLANG_REQ_RUNNING_TIMEOUT"),
        "a clock on each rank would let ranks decide differently",
    ),
)

SLIDING_WINDOW = Refusal(
    "A model with hybrid sliding-window attention", lambda *_: True, "its second KV pool is not stored with a partial"
)
RECURRENT_STATE = Refusal(
    "A model with recurrent (Mamba-like) layers", lambda *_: True, "their state is not stored with a partial"
)


def find(server_args: Any, env: Environment) -> Refusal | None:
    """The first row that applies to these arguments, or None."""
    return next((row for row in REFUSALS if row.applies(server_args, env)), None)


def find_in_model(server_args: Any) -> Refusal | None:
    """Why the model is not supported, or None; reads its config file, not its weights."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = server_args.get_model_config()
    if model.is_hybrid_swa:
        return SLIDING_WINDOW
    return RECURRENT_STATE if mambaish_config(model) is not None else None


def stop_if(refusal: Refusal | None) -> None:
    """End the start with the refusal's sentence, if there is one."""
    if refusal is not None:
        raise SystemExit(f"sglang-april: {refusal.sentence()}")
