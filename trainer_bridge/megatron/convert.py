"""The command `april-convert`: converts a trainer checkpoint to a Hugging Face folder.

It needs neither a GPU nor process groups, and loads one tensor at a time from the memory-mapped checkpoint.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer_bridge.hf_folder import write_hf
from trainer_bridge.megatron import mapping
from trainer_bridge.megatron.shapes import Llama3Rope, ModelShape


def read_states(checkpoint: Path) -> list[dict[str, Any]]:
    """The states of the ranks of one tensor-parallel group, in order, as `Trainer.save` wrote them."""
    files = sorted(checkpoint.glob("rank-0-of-*.pt"))
    if len(files) != 1:
        raise FileNotFoundError(f"{checkpoint} must contain exactly one trainer checkpoint (rank-0-of-N.pt)")
    first = _load(files[0])
    size = int(first["settings"]["tensor_model_parallel_size"])
    return [first] + [_load(files[0].with_name(files[0].name.replace("rank-0", f"rank-{i}"))) for i in range(1, size)]


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def hf_tensors(states: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The policy by Hugging Face names."""
    fields = states[0]["shape"]
    scaling = fields["rope_scaling"]
    shape = ModelShape(**{**fields, "rope_scaling": scaling and Llama3Rope(**scaling)})
    fused = any(name.endswith("layer_norm_weight") for name in states[0]["model"])
    for row in mapping.parameter_mappings(shape, fused_norms=fused):
        full = mapping.unshard(row, [state["model"][row.megatron] for state in states])
        yield from mapping.to_hf(row, full, shape).items()


def convert(checkpoint: Path, source: Path, folder: Path) -> None:
    """Write `folder`, with configuration and tokenizer from `source`."""
    write_hf(hf_tensors(read_states(checkpoint)), source, folder)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Convert a trainer checkpoint to a Hugging Face folder.")
    parser.add_argument("checkpoint", type=Path, help="trainer checkpoint: a folder with rank-0-of-N.pt")
    parser.add_argument("folder", type=Path, help="Hugging Face folder to write")
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="source of configuration and tokenizer; default: the trainer's hf_checkpoint",
    )
    args = parser.parse_args()
    source = args.hf_checkpoint or Path(read_states(args.checkpoint)[0]["settings"]["hf_checkpoint"])
    convert(args.checkpoint, source, args.folder)
    print(args.folder)  # noqa: T201  (the command's output)


if __name__ == "__main__":
    main()
