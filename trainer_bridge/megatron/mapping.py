"""Names and layouts: Hugging Face ↔ Megatron-core, whole tensors ↔ tensor-parallel shards.

Megatron fuses what is computed together: `linear_qkv` holds, for each key/value head, the rows of its query heads, then
its key, then its value; `linear_fc1` holds the gate's rows, then the up projection's, and each of the two is sharded by
itself. Its norms have two sets of names: TransformerEngine keeps them inside the linear layer that follows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from trainer_bridge.megatron.shapes import ModelShape


class Kind(Enum):
    """How a Megatron tensor is put together and sharded."""

    WHOLE = auto()
    """The same on every rank."""
    ROWS = auto()
    """Cut along dimension 0."""
    COLUMNS = auto()
    """Cut along dimension 1."""
    QKV = auto()
    """Made of query, key and value; cut along dimension 0."""
    GATE_UP = auto()
    """Made of gate and up, one tensor or two; each cut along dimension 0."""


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    megatron: str
    hf: tuple[str, ...]
    kind: Kind


def rows(shape: ModelShape, *, fused_norms: bool) -> list[Row]:
    """All parameters of a model, in the order of its layers. `fused_norms`: TransformerEngine's names of norms."""
    table = [Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Kind.ROWS)]
    for layer in range(shape.layers):
        table += _layer(shape, f"decoder.layers.{layer}.", f"model.layers.{layer}.", fused_norms)
    table.append(Row("decoder.final_layernorm.weight", ("model.norm.weight",), Kind.WHOLE))
    if not shape.tied:
        table.append(Row("output_layer.weight", ("lm_head.weight",), Kind.ROWS))
    return table


def _layer(shape: ModelShape, ours: str, theirs: str, fused_norms: bool) -> list[Row]:
    attention, mlp = f"{ours}self_attention.", f"{ours}mlp."
    norms = {
        f"{attention}linear_qkv.layer_norm_weight"
        if fused_norms
        else f"{ours}input_layernorm.weight": "input_layernorm",
        f"{mlp}linear_fc1.layer_norm_weight"
        if fused_norms
        else f"{ours}pre_mlp_layernorm.weight": "post_attention_layernorm",
    }
    if shape.qk_norm:
        norms |= {f"{attention}{x}_layernorm.weight": f"self_attn.{x}_norm" for x in ("q", "k")}
    if shape.sandwich:
        norms |= {f"{ours}{name}.weight": name for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}
    qkv = [f"{theirs}self_attn.{x}_proj" for x in ("q", "k", "v")]
    gate_up = ("gate_up_proj",) if shape.sandwich else ("gate_proj", "up_proj")
    table = [
        Row(f"{attention}linear_qkv.weight", tuple(f"{x}.weight" for x in qkv), Kind.QKV),
        Row(f"{attention}linear_proj.weight", (f"{theirs}self_attn.o_proj.weight",), Kind.COLUMNS),
        Row(f"{mlp}linear_fc1.weight", tuple(f"{theirs}mlp.{x}.weight" for x in gate_up), Kind.GATE_UP),
        Row(f"{mlp}linear_fc2.weight", (f"{theirs}mlp.down_proj.weight",), Kind.COLUMNS),
        *(Row(name, (f"{theirs}{norm}.weight",), Kind.WHOLE) for name, norm in norms.items()),
    ]
    if shape.qkv_bias:
        table.append(Row(f"{attention}linear_qkv.bias", tuple(f"{x}.bias" for x in qkv), Kind.QKV))
    return table


def to_megatron(row: Row, hf: Mapping[str, Tensor], shape: ModelShape) -> Tensor:
    """The whole Megatron tensor of a row from the Hugging Face tensors."""
    parts = [hf[name] for name in row.hf]
    if row.kind is Kind.QKV:
        heads = [part.reshape(shape.kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(heads, dim=1).reshape(-1, *parts[0].shape[1:])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def to_hf(row: Row, whole: Tensor, shape: ModelShape) -> dict[str, Tensor]:
    """The Hugging Face tensors of a row from the whole Megatron tensor; contiguous."""
    if row.kind is Kind.QKV:
        per_head = whole.reshape(shape.kv_heads, -1, *whole.shape[1:])
        sizes = [shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim, shape.head_dim]
        parts = [part.reshape(-1, *whole.shape[1:]) for part in per_head.split(sizes, dim=1)]
    else:
        parts = list(whole.chunk(len(row.hf)))
    return {name: part.contiguous() for name, part in zip(row.hf, parts, strict=True)}


def shard(row: Row, whole: Tensor, rank: int, size: int) -> Tensor:
    """The part of a whole Megatron tensor that tensor-parallel rank `rank` of `size` holds."""
    if row.kind is Kind.WHOLE or size == 1:
        return whole
    if row.kind is Kind.COLUMNS:
        return whole.chunk(size, dim=1)[rank]
    if row.kind is Kind.GATE_UP:
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size)[rank]


def unshard(row: Row, shards: Sequence[Tensor]) -> Tensor:
    """The whole Megatron tensor from its shards in the order of ranks."""
    if row.kind is Kind.WHOLE or len(shards) == 1:
        return shards[0]
    if row.kind is Kind.COLUMNS:
        return torch.cat(list(shards), dim=1)
    if row.kind is Kind.GATE_UP:
        halves = [part.chunk(2) for part in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(list(shards))
