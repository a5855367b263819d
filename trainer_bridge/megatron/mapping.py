"""Maps parameter names and layouts: Hugging Face ↔ Megatron-core, full tensors ↔ tensor-parallel shards.

Megatron fuses projections: `linear_qkv` contains, for each key/value head, the rows of its query heads, then its key,
then its value; `linear_fc1` contains the rows of the gate, then those of the up projection, and each of the two is
sharded separately. Norms have two sets of names: TransformerEngine keeps them in the linear layer that follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from trainer_bridge.megatron.shapes import ModelShape


class Kind(Enum):
    """How a Megatron tensor is composed and sharded."""

    REPLICATED = auto()
    """The same on every rank."""
    ROWS = auto()
    """Sharded along dimension 0."""
    COLUMNS = auto()
    """Sharded along dimension 1."""
    QKV = auto()
    """Query, key and value, fused per key/value head; sharded along dimension 0."""
    GATE_UP = auto()
    """Gate and up projection; each sharded along dimension 0."""


@dataclass(frozen=True, slots=True)
class ParameterMapping:
    """A Megatron parameter and the Hugging Face tensors that it is composed of."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind


def parameter_mappings(shape: ModelShape, *, fused_norms: bool) -> list[ParameterMapping]:
    """All parameters of a model, in layer order. `fused_norms`: use TransformerEngine's names for norms."""
    table = [ParameterMapping("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Kind.ROWS)]
    for layer in range(shape.layers):
        table += _layer(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.", fused_norms)
    table.append(ParameterMapping("decoder.final_layernorm.weight", ("model.norm.weight",), Kind.REPLICATED))
    if not shape.tied:
        table.append(ParameterMapping("output_layer.weight", ("lm_head.weight",), Kind.ROWS))
    return table


def _layer(shape: ModelShape, megatron: str, hf: str, fused_norms: bool) -> list[ParameterMapping]:
    attention, mlp = f"{megatron}self_attention.", f"{megatron}mlp."
    norms = {
        f"{attention}linear_qkv.layer_norm_weight"
        if fused_norms
        else f"{megatron}input_layernorm.weight": "input_layernorm",
        f"{mlp}linear_fc1.layer_norm_weight"
        if fused_norms
        else f"{megatron}pre_mlp_layernorm.weight": "post_attention_layernorm",
    }
    if shape.qk_norm:
        norms |= {f"{attention}{x}_layernorm.weight": f"self_attn.{x}_norm" for x in ("q", "k")}
    if shape.sandwich:
        norms |= {f"{megatron}{name}.weight": name for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}
    qkv = [f"{hf}self_attn.{x}_proj" for x in ("q", "k", "v")]
    gate_up = ("gate_up_proj",) if shape.sandwich else ("gate_proj", "up_proj")
    table = [
        ParameterMapping(f"{attention}linear_qkv.weight", tuple(f"{x}.weight" for x in qkv), Kind.QKV),
        ParameterMapping(f"{attention}linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), Kind.COLUMNS),
        ParameterMapping(f"{mlp}linear_fc1.weight", tuple(f"{hf}mlp.{x}.weight" for x in gate_up), Kind.GATE_UP),
        ParameterMapping(f"{mlp}linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), Kind.COLUMNS),
        *(ParameterMapping(name, (f"{hf}{norm}.weight",), Kind.REPLICATED) for name, norm in norms.items()),
    ]
    if shape.qkv_bias:
        table.append(ParameterMapping(f"{attention}linear_qkv.bias", tuple(f"{x}.bias" for x in qkv), Kind.QKV))
    return table


def to_megatron(row: ParameterMapping, hf: Mapping[str, Tensor], shape: ModelShape) -> Tensor:
    """The full Megatron tensor, from the Hugging Face tensors."""
    parts = [hf[name] for name in row.hf]
    if row.kind is Kind.QKV:
        heads = [part.reshape(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(heads, dim=1).reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def to_hf(row: ParameterMapping, full: Tensor, shape: ModelShape) -> dict[str, Tensor]:
    """The Hugging Face tensors, contiguous, from the full Megatron tensor."""
    if row.kind is Kind.QKV:
        per_head = full.reshape(shape.kv_heads, -1, *full.shape[1:])
        sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
        parts = [part.reshape(-1, *full.shape[1:]) for part in per_head.split(sizes, dim=1)]
    else:
        parts = list(full.chunk(len(row.hf)))
    return {name: part.contiguous() for name, part in zip(row.hf, parts, strict=True)}


def shard(row: ParameterMapping, full: Tensor, rank: int, size: int) -> Tensor:
    """The shard of a full Megatron tensor on tensor-parallel rank `rank` of `size`."""
    if row.kind is Kind.REPLICATED or size == 1:
        return full
    if row.kind is Kind.COLUMNS:
        return full.chunk(size, dim=1)[rank]
    if row.kind is Kind.GATE_UP:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size)[rank]


def unshard(row: ParameterMapping, shards: Sequence[Tensor]) -> Tensor:
    """The full Megatron tensor, from its shards in rank order."""
    if row.kind is Kind.REPLICATED or len(shards) == 1:
        return shards[0]
    if row.kind is Kind.COLUMNS:
        return torch.cat(list(shards), dim=1)
    if row.kind is Kind.GATE_UP:
        halves = [part.chunk(2) for part in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards))
