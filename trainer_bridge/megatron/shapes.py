"""The shape of a dense model, from a Hugging Face configuration. Megatron builds from it, and engines must match it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "glm4": "Glm4ForCausalLM",
}


class UnsupportedModelError(ValueError):
    """A model that the trainer does not support."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Parameters of Llama 3.1's RoPE scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder of one of the families in `ARCHITECTURES`."""

    family: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_fraction: float
    """Fraction of each head's dimensions that are rotated."""
    rope_scaling: Llama3Rope | None
    qkv_bias: bool
    tied: bool
    """Output layer and embedding share their weights."""
    max_positions: int

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return self.family == "qwen3"

    @property
    def sandwich(self) -> bool:
        """Whether there are norms after attention and MLP too, a fused gate-up tensor, and interleaved RoPE (GLM-4)."""
        return self.family == "glm4"

    def check_tensor_parallel(self, size: int) -> None:
        """Raises: UnsupportedModelError: the tensor-parallel size does not divide the model."""
        for name in ("vocab", "heads", "kv_heads", "mlp"):
            if getattr(self, name) % size:
                raise UnsupportedModelError(
                    f"tensor_model_parallel_size {size} does not divide {name} = {getattr(self, name)}"
                )

    @classmethod
    def read(cls, folder: Path) -> "ModelShape":
        """The shape in `config.json`, as written by transformers before or since version 5.

        Raises: UnsupportedModelError.
        """
        try:
            return cls.of(json.loads((folder / "config.json").read_text()))
        except KeyError as error:
            raise UnsupportedModelError(f"{folder / 'config.json'} has no {error.args[0]}") from error

    @classmethod
    def of(cls, config: dict[str, Any]) -> "ModelShape":
        """The shape in the contents of a `config.json`. Raises: UnsupportedModelError."""
        family = config.get("model_type", "")
        _check_supported(config, family)
        rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
        fraction = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        return cls(
            family=family,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            mlp=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            rope_fraction=fraction or (0.5 if family == "glm4" else 1.0),
            rope_scaling=_scaling(rope),
            qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=config["max_position_embeddings"],
        )


def _scaling(rope: dict[str, Any]) -> Llama3Rope | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; only llama3 is")
    return Llama3Rope(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    )


def _check_supported(config: dict[str, Any], family: str) -> None:
    if family not in ARCHITECTURES:
        raise UnsupportedModelError(f"model_type {family!r} is not one of {', '.join(ARCHITECTURES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not silu")
    if config.get("use_sliding_window"):
        raise UnsupportedModelError("sliding-window attention is not supported")
    if config.get("mlp_bias") or (config.get("attention_bias") and family in ("llama", "qwen3")):
        raise UnsupportedModelError(f"biases in attention output or MLP ({family}) are not supported")
