"""`april-convert`: a trainer's checkpoint as a Hugging Face folder; needs no GPU, no process groups and one tensor at a
time in memory (the checkpoint is mapped, not read)."""

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
    """The states of one tensor-parallel group, in the order of its ranks, from a folder that `Trainer.save` wrote."""
    files = sorted(checkpoint.glob("rank-0-of-*.pt"))
    if len(files) != 1:
        raise FileNotFoundError(f"{checkpoint} holds no trainer's checkpoint (rank-0-of-N.pt), or several")
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
    for row in mapping.rows(shape, fused_norms=fused):
        whole = mapping.unshard(row, [state["model"][row.megatron] for state in states])
        yield from mapping.to_hf(row, whole, shape).items()


def convert(checkpoint: Path, source: Path, folder: Path) -> None:
    """Write `folder`, with configuration and tokenizer of `source`."""
    write_hf(hf_tensors(read_states(checkpoint)), source, folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="A trainer's checkpoint as a Hugging Face folder.")
    parser.add_argument("checkpoint", type=Path, help="folder with rank-0-of-N.pt")
    parser.add_argument("folder", type=Path, help="Hugging Face folder to write")
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="where configuration and tokenizer are; by default where the trainer had them",
    )
    args = parser.parse_args()
    source = args.hf_checkpoint or Path(read_states(args.checkpoint)[0]["settings"]["hf_checkpoint"])
    convert(args.checkpoint, source, args.folder)
    print(args.folder)  # noqa: T201  (its output)


if __name__ == "__main__":
    main()
