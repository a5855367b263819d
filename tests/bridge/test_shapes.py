"""Model shapes from Hugging Face configurations of real models, and unsupported ones."""

import math
from typing import Any

import pytest
import torch

from examples.tiny_model import config
from trainer_bridge.megatron.shapes import Llama3Rope, ModelShape, UnsupportedModelError

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "use_sliding_window": False,
}


def test_shape_is_read_from_the_configuration() -> None:
    shape = ModelShape.of(QWEN3_4B)
    assert (shape.heads * shape.head_dim, shape.rope_theta, shape.rope_fraction) == (4096, 1e6, 1.0)
    assert shape.qk_norm
    assert shape.tied
    assert not shape.qkv_bias
    shape.check_tensor_parallel(8)


def test_rope_parameters_of_newer_transformers_are_read() -> None:
    fields = {k: v for k, v in config("glm4").items() if k not in ("rope_theta", "partial_rotary_factor")}
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    shape = ModelShape.of(fields)
    assert (shape.rope_theta, shape.rope_fraction, shape.rope_scaling) == (5000.0, 0.25, None)


def test_head_size_and_key_value_heads_have_defaults() -> None:
    fields = {k: v for k, v in config("qwen2").items() if k not in ("head_dim", "num_key_value_heads")}
    shape = ModelShape.of(fields)
    assert (shape.head_dim, shape.kv_heads, shape.qkv_bias) == (32, 4, True)


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("qwen3", {"model_type": "mixtral"}, "mixtral"),
        ("qwen3", {"hidden_act": "gelu"}, "gelu"),
        ("qwen2", {"use_sliding_window": True}, "sliding"),
        ("llama", {"mlp_bias": True}, "biases"),
        ("qwen3", {"attention_bias": True}, "biases"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
)
def test_unsupported_model_is_refused_with_the_reason(family: str, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        ModelShape.of({**config(family), **changed})


@pytest.mark.parametrize("size", [4, 3])
def test_tensor_parallel_size_that_does_not_divide_the_model_is_refused(size: int) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tensor_model_parallel_size {size}"):
        ModelShape.of(config("qwen3")).check_tensor_parallel(size)


def test_llama_3_frequencies_equal_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from trainer_bridge.megatron.model import scaled_frequencies

    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    fields = {**config("llama"), "head_dim": 64, "rope_theta": 500000.0, "rope_scaling": scaling}
    shape = ModelShape.of(fields)
    assert shape.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    reference_config = LlamaConfig(hidden_size=128, head_dim=64, rope_parameters={**scaling, "rope_theta": 500000.0})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](reference_config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    torch.testing.assert_close(scaled_frequencies(plain, shape.rope_scaling), expected)
    assert math.isclose(float(expected[-1]), float(plain[-1]) / 32, rel_tol=1e-5)
