"""Checkpoints with the shape of a big model and random weights, for machines without downloads.

    python -m bench.random_checkpoint out/a --seed 0          # Qwen3-4B: 8 GB of bfloat16
    python -m bench.random_checkpoint out/b --seed 1

    python -m bench.random_checkpoint out/c --shape qwen3-0.6b

The shapes are those of Qwen/Qwen3-4B's and Qwen/Qwen3-0.6B's config.json. The tokenizer is the tiny models',
its vocabulary filled up, so that whatever is drawn can be decoded. A layer is a file, so that no more than one is in
memory.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples import tiny_model


@dataclass(frozen=True)
class CheckpointShape:
    """Sizes of a Qwen3 model with a tied embedding."""

    hidden: int = 2560
    mlp: int = 9728
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936
    context: int = 262_144

    def config(self) -> dict[str, Any]:
        """The contents of `config.json`."""
        return tiny_model.config("qwen3", "bfloat16") | {
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rope_theta": 1_000_000.0,
        }


SHAPES = {
    "qwen3-4b": CheckpointShape(),
    "qwen3-0.6b": CheckpointShape(hidden=1024, mlp=3072, layers=28, heads=16),
    "paced": CheckpointShape(hidden=32, mlp=64, layers=1, heads=1, kv_heads=1, head_dim=16, vocab=512),
}
"""`paced` replaces a big model on a CPU at a GPU's pace: its KV has 128 bytes per token in float32."""


def make(path: Path, shape: CheckpointShape, seed: int = 0) -> Path:
    """Write the model in bfloat16 and a tokenizer into the folder `path`; returns it. `config.json` is written last."""
    tiny_model.make(path, "qwen3", "bfloat16", seed)
    (path / "model.safetensors").unlink()
    (path / "config.json").unlink()
    _fill_vocabulary(path / "tokenizer.json", shape.vocab)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    noise = torch.Generator(device).manual_seed(seed)
    where: dict[str, str] = {}
    files = list(tiny_model.weight_shapes(shape.config()))
    for number, sizes in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        save_file({key: _weight(key, size, noise).cpu() for key, size in sizes.items()}, path / name, {"format": "pt"})
        where |= dict.fromkeys(sizes, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    return path


def two_policies(folder: Path, shape: str) -> tuple[Path, Path]:
    """Two checkpoints of a shape with different weights; `tiny` is the tests' tiny model."""
    if shape == "tiny":
        return tiny_model.make(folder / "v0", seed=0), tiny_model.make(folder / "v1", seed=1)
    return make(folder / "v0", SHAPES[shape], seed=0), make(folder / "v1", SHAPES[shape], seed=1)


def _weight(name: str, size: Sequence[int], noise: torch.Generator) -> torch.Tensor:
    """Scale weights so that logits have a standard deviation of about 1, as in the tiny models."""
    drawn = torch.randn(tuple(size), generator=noise, device=noise.device)
    return (1 + 0.1 * drawn if "norm" in name else drawn * size[-1] ** -0.5).bfloat16()


def _fill_vocabulary(path: Path, count: int) -> None:
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    known = set(vocabulary.values())
    vocabulary |= {f"<{number}>": number for number in range(count) if number not in known}
    path.write_text(json.dumps(tokenizer))


def main(given: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.random_checkpoint", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("path", type=Path, help="folder to write")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-4b", help="shape of the model (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (%(default)s)")
    args = parser.parse_args(given)
    print(make(args.path, SHAPES[args.shape], args.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
