"""Builds a Megatron-core GPT model of a given shape, and computes the logprobs of packed sequences.

Sequences are packed (THD) without padding. The attention is TransformerEngine's if it is installed, else PyTorch's,
one sequence at a time.
"""

import math
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer_bridge.batch import Sequences
from trainer_bridge.megatron.shapes import Llama3Rope, ModelShape


def transformer_config(shape: ModelShape, dtype: torch.dtype, tensor_parallel: int, on_cpu: bool) -> TransformerConfig:
    """Megatron's configuration of a shape. Fusions are off: each needs APEX, TransformerEngine or a compiler."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        rotary_interleaved=shape.sandwich,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=on_cpu,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        cuda_graph_scope=[],  # the default is a deprecated name of this one
    )


def build_model(shape: ModelShape, dtype: torch.dtype, on_cpu: bool, recompute: bool = False) -> GPTModel:
    """The model on this tensor-parallel rank, with uninitialised weights.

    Args:
        recompute: layers keep only their inputs for the backward pass, by PyTorch's checkpoints. Megatron's restore
            random states, which needs CUDA; without dropout, this model draws nothing.
    """
    shape.check_tensor_parallel(parallel_state.get_tensor_model_parallel_world_size())
    config = transformer_config(shape, dtype, parallel_state.get_tensor_model_parallel_world_size(), on_cpu)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(shape, transformer_engine=gpt_layer_specs.HAVE_TE and not on_cpu),
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_percent=shape.rope_fraction,
        rotary_base=shape.rope_theta,
    )
    if shape.rope_scaling is not None:
        rope = model.rotary_pos_emb
        rope.inv_freq = scaled_frequencies(rope.inv_freq, shape.rope_scaling)
    for layer in model.decoder.layers if recompute else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return model


def layer_spec(shape: ModelShape, *, transformer_engine: bool) -> ModuleSpec:
    """A layer of TransformerEngine modules, or of Megatron's own with `PackedAttention`."""
    if transformer_engine:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
        spec.submodules.self_attention.submodules.core_attention = PackedAttention
    if shape.sandwich:
        spec.module = SandwichLayer
    return spec


def scaled_frequencies(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Llama 3.1's RoPE scaling: low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    share = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return frequencies * (share + (1 - share) / scaling.factor)


class PackedAttention(MegatronModule):
    """Causal attention within each packed sequence; replaces Megatron's `DotProductAttention`."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams,
        attention_bias: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """query [N, heads, head_dim], key and value [N, kv_heads, head_dim] -> [N, heads × head_dim]."""
        assert attention_mask is None
        assert attention_bias is None
        ends = packed_seq_params.cu_seqlens_q
        lengths = (ends[1:] - ends[:-1]).tolist()
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
            # [1, heads, tokens, head_dim]: for three dimensions, PyTorch has no fused attention.
            q = q.transpose(0, 1)[None]
            k, v = (x.transpose(0, 1).repeat_interleave(repeat, dim=0)[None] for x in (k, v))
            output = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class SandwichLayer(TransformerLayer):
    """GLM-4's layer: the outputs of attention and MLP are normalised before they are added to the residual."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
            norm = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon).to(config.params_dtype)
            setattr(self, name, norm.to(torch.cuda.current_device()))
        for name, norm in (("self_attn_bda", self.post_self_attn_layernorm), ("mlp_bda", self.post_mlp_layernorm)):
            setattr(self, name, _normalising(norm, getattr(self, name)))


def _normalising(norm: torch.nn.Module, bias_dropout_add: Any) -> Any:
    """Megatron's bias-dropout-add function, with a norm before the addition."""

    def make(training: bool, fused: bool) -> Any:
        add = bias_dropout_add(training, fused)

        def add_normalised(
            output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, probability: float
        ) -> Tensor:
            output, bias = output_with_bias
            return add((norm(output if bias is None else output + bias), None), residual, probability)

        return add_normalised

    return make


def logits(model: Any, sequences: Sequences) -> Tensor:
    """The logits of every position, [N, vocab / tp], in the model's dtype or float32."""
    lengths = sequences.lengths
    ends = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    starts = ends[:-1].repeat_interleave(lengths)
    positions = torch.arange(len(sequences.ids), device=ends.device) - starts
    out = model(
        input_ids=sequences.ids[None],
        position_ids=positions[None],
        attention_mask=None,
        packed_seq_params=packed,
    )
    return out[0]


def logprobs(model: Any, sequences: Sequences) -> Tensor:
    """log π of the response tokens at their temperature, float32 [T], with gradient; the same on all ranks.

    Indexing the rows copies them, which is necessary because Megatron's cross entropy works in place.
    """
    rows = response_rows(sequences)
    temperature = sequences.temperature.repeat_interleave(sequences.responses)
    scaled = logits(model, sequences)[rows].float() / temperature[:, None]
    return -vocab_parallel_cross_entropy(scaled[:, None], sequences.ids[rows + 1][:, None])[:, 0]


def response_rows(sequences: Sequences) -> Tensor:
    """The positions whose logits predict the T response tokens: the one before each, int64 [T]."""
    ends, responses = sequences.lengths.cumsum(0), sequences.responses
    firsts = ends - responses - 1
    within = torch.arange(int(responses.sum()), device=ends.device)
    within = within - (responses.cumsum(0) - responses).repeat_interleave(responses)
    return firsts.repeat_interleave(responses) + within
