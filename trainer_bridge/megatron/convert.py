"""The command `april-convert`: converts a trainer checkpoint to a Hugging Face folder.

It needs neither a GPU nor process groups, and loads one tensor at a time from the memory-mapped checkpoint.
"""

import argparse
import sys
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


def find_checkpoint(path: Path) -> Path:
    """The folder of a trainer checkpoint: `path`, or the one in a step's folder, or in a run's newest step.

    Raises:
        FileNotFoundError: there is none.
    """
    steps = sorted(path.glob("checkpoints/step-*"))
    for folder in (path, path / "trainer", *(step / "trainer" for step in steps[-1:])):
        if (files := sorted(folder.glob("rank-0-of-*.pt"))) and len(files) == 1:
            return folder
    raise FileNotFoundError(
        f"{path} has no checkpoint: it must be the folder of a run (`save` in its configuration), of one of its steps "
        "(RUN/checkpoints/step-N), or of a trainer's files (rank-0-of-N.pt)"
    )


def main() -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="april-convert", description="Convert a checkpoint of a training run to a Hugging Face folder."
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a run (its newest step), of a step, or of a trainer")
    parser.add_argument("folder", type=Path, nargs="?", help="output; default: hf/ beside the trainer's files")
    parser.add_argument(
        "--hf-checkpoint",
        type=Path,
        help="source of configuration and tokenizer; default: the trainer's hf_checkpoint",
    )
    args = parser.parse_args()
    try:
        checkpoint = find_checkpoint(args.checkpoint)
        source = args.hf_checkpoint or Path(read_states(checkpoint)[0]["settings"]["hf_checkpoint"])
        if not (source / "config.json").exists():
            raise FileNotFoundError(f"{source} has no config.json; name the initial checkpoint with --hf-checkpoint")
        folder = args.folder or checkpoint.parent / "hf"
        convert(checkpoint, source, folder)
    except OSError as error:
        print(f"april-convert: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{checkpoint} as a Hugging Face model: {folder}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
