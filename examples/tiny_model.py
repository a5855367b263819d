"""Tiny random models for tests and examples: a Hugging Face folder with weights and a real tokenizer, in a second.

The shapes are those of the big models, two layers deep: grouped-query attention with 4 query and 2 key/value heads (so
tensor parallelism over 2 works), a byte-level BPE tokenizer of 512 tokens and a chat template. The weights are random
and scaled so that sampling at temperature 1 gives varied text; norm weights differ from 1, so that a norm applied
wrongly or twice shows.

The files are written directly, without torch and transformers, whose import takes longer than all the rest.

    python -m examples.tiny_model out/tiny-qwen3 --family qwen3 --dtype float32 --seed 0
"""

from __future__ import annotations

import argparse
import json
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE, HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 128, 256, 2, 4, 2, 32
SPECIAL_TOKENS = ["<bos>", "<eos>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, PAD = 0, 1, 2
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DTYPES = ("float32", "bfloat16")

_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "glm4": "Glm4ForCausalLM",
}
FAMILIES = tuple(_ARCHITECTURES)

_CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the other animals",
    "a batch of samples waits for the slowest one while the machine is nearly empty",
    "stop when enough have finished and continue the rest with the next policy",
    'numbers 0 1 2 3 4 5 6 7 8 9 10 20 30, {"name": "value", "list": [1, 2, 3]}',
    "one two three four five six seven eight nine ten eleven twelve thirteen",
]


def config(family: str, dtype: str = "float32") -> dict[str, Any]:
    """The contents of ``config.json`` for a family in the tiny shape."""
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, not {family!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": family in ("qwen2", "glm4"),
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": dtype,
    }
    if family == "glm4":
        fields["partial_rotary_factor"] = 0.5
    return fields


def weight_shapes(fields: dict[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the weights of a model with this `config.json`: the embedding and the last norm, then layer
    by layer."""
    hidden = fields["hidden_size"]
    yield {"model.embed_tokens.weight": (fields["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(fields["num_hidden_layers"]):
        yield _layer_shapes(fields, f"model.layers.{layer}")


def _layer_shapes(fields: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    family, hidden, inner = fields["model_type"], fields["hidden_size"], fields["intermediate_size"]
    head_dim = fields["head_dim"]
    q, kv = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    shapes: dict[str, tuple[int, ...]] = {
        f"{attention}.q_proj.weight": (q, hidden),
        f"{attention}.k_proj.weight": (kv, hidden),
        f"{attention}.v_proj.weight": (kv, hidden),
        f"{attention}.o_proj.weight": (hidden, q),
        f"{mlp}.down_proj.weight": (hidden, inner),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if family == "glm4":
        shapes[f"{mlp}.gate_up_proj.weight"] = (2 * inner, hidden)
        shapes[f"{prefix}.post_self_attn_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_mlp_layernorm.weight"] = (hidden,)
    else:
        shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (inner, hidden)
    if family == "qwen3":
        shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (head_dim,)
    if family in ("qwen2", "glm4"):
        shapes |= {
            f"{attention}.q_proj.bias": (q,),
            f"{attention}.k_proj.bias": (kv,),
            f"{attention}.v_proj.bias": (kv,),
        }
    return shapes


def weights(family: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by name, the same for the same seed on every machine."""
    shapes = ChainMap(*weight_shapes(config(family)))
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in sorted(shapes.items()):
        noise = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            noise = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            noise *= 0.1
        else:
            # Logits are a norm's output times the tied embedding: with this scale their spread is about 1.
            noise *= np.float32(HIDDEN**-0.5 if "embed" in name else shape[-1] ** -0.5)
        made[name] = noise.astype(np.float32)
    return made


def _as_bfloat16(array: np.ndarray) -> bytes:
    """Float32 rounded to the nearest bfloat16 (ties to even), as bytes."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _write_safetensors(path: Path, arrays: dict[str, np.ndarray], dtype: str) -> None:
    """The safetensors format: the header's length in eight bytes, the header as JSON, the data one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blocks, at = [], 0
    for name, array in arrays.items():
        block = _as_bfloat16(array) if dtype == "bfloat16" else array.astype("<f4").tobytes()
        code = "BF16" if dtype == "bfloat16" else "F32"
        header[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [at, at + len(block)]}
        blocks.append(block)
        at += len(block)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of at most 512 tokens: any text survives encoding and decoding."""
    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_CORPUS * 10, trainer)
    return bpe


def make(path: str | Path, family: str = "qwen3", dtype: str = "float32", seed: int = 0) -> Path:
    """Write model and tokenizer into the folder ``path`` and returns it."""
    path = Path(path)
    fields = config(family, dtype)
    path.mkdir(parents=True, exist_ok=True)
    _write_safetensors(path / "model.safetensors", weights(family, seed), dtype)
    tokenizer().save(str(path / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    tokenizer_fields = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **special}
    generation = {key: fields[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    files = {"config": fields, "generation_config": generation, "tokenizer_config": tokenizer_fields}
    for name, contents in files.items():
        (path / f"{name}.json").write_text(json.dumps(contents, indent=2) + "\n")
    return path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(make(args.path, args.family, args.dtype, args.seed))


if __name__ == "__main__":
    main()
