"""What ends the start of SGLang: arguments, environment variables, and models."""

from collections.abc import Callable
from typing import Any

from sglang_april import config
from sglang_april.adapter import refusals
from sglang_april.adapter.core.arguments import ARGUMENTS
from sglang_april.adapter.core.environment import ENVIRONMENT, changed_variables
from sglang_april.adapter.refusals import Refusal
from sglang_april.adapter.shapes.installed import shape

__all__ = ["ARGUMENTS", "ENVIRONMENT", "MODELS", "find", "find_in_model", "find_pace"]


def _hybrid_window(model: Any) -> bool:
    return bool(model.is_hybrid_swa)


def _recurrent(model: Any) -> bool:
    return shape.is_recurrent(model)


def _sparse(model: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse

    return any(is_one(model.hf_config) for is_one in (is_deepseek_dsa, is_deepseek_v4, is_minimax_sparse))


def _encoder_decoder(model: Any) -> bool:
    return bool(model.is_encoder_decoder)


def _ngram_embedding(model: Any) -> bool:
    return bool(model.use_ngram_embedding)


MODELS: tuple[tuple[Callable[[Any], bool], Refusal], ...] = (
    (
        _hybrid_window,
        Refusal(
            "A model with hybrid sliding-window attention",
            "a suspend does not store the KV pool of the sliding window",
        ),
    ),
    (
        _recurrent,
        Refusal("A model with recurrent (Mamba-like) layers", "a suspend does not store their state"),
    ),
    (
        _sparse,
        Refusal(
            "A model with sparse attention (DeepSeek-V3.2 and V4, GLM-5, MiniMax)",
            "a suspend does not store its index keys",
        ),
    ),
    (
        _encoder_decoder,
        Refusal("A model with an encoder and a decoder (Mllama, Whisper)", "a suspend does not store the encoder's KV"),
    ),
    (
        _ngram_embedding,
        Refusal(
            "A model with n-gram embeddings (LongCat)",
            "the model indexes the last tokens by request slot, and a resumed sample gets another slot",
        ),
    ),
)
"""A test of SGLang's ModelConfig, and the refusal of models for which it is true."""


def find(server_args: Any) -> Refusal | None:
    """The first argument or variable that no rule accepts, or None."""
    return _find_argument(server_args) or refusals.find(changed_variables(), ENVIRONMENT, shape.resolved(server_args))


def _find_argument(server_args: Any) -> Refusal | None:
    changed = refusals.changed_arguments(shape.arguments(server_args))
    return refusals.find(changed, ARGUMENTS, shape.resolved(server_args))


def find_in_model(server_args: Any) -> Refusal | None:
    """Why the model is not supported, or None; reads its config file, not its weights."""
    model = shape.model_config(server_args)
    return next((refusal for applies, refusal in MODELS if applies(model)), None)


def find_pace(server_args: Any) -> Refusal | None:
    """Why `--april-cpu-pace` cannot take effect, or None."""
    device = shape.resolved(server_args).device
    if config.load().cpu_pace is None or device == "cpu":
        return None
    return Refusal(f"--april-cpu-pace with --device {device}", "it paces the portable CPU platform only")
