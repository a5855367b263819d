"""Loads Hugging Face weights into a Megatron model, and gathers them from it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from trainer_bridge.hf_folder import HFCheckpoint
from trainer_bridge.megatron import mapping
from trainer_bridge.megatron.mapping import ParameterMapping
from trainer_bridge.megatron.shapes import ModelShape


def mapped_parameters(model: Any, shape: ModelShape) -> list[tuple[ParameterMapping, torch.nn.Parameter]]:
    """Every parameter of the model with its mapping. Raises: RuntimeError: they do not match one to one."""
    parameters = dict(model.named_parameters())
    fused = any(name.endswith("layer_norm_weight") for name in parameters)
    rows = mapping.parameter_mappings(shape, fused_norms=fused)
    if differing := {row.megatron for row in rows} ^ set(parameters):
        raise RuntimeError(f"the mapping of {shape.family} and its model differ in {sorted(differing)}")
    return [(row, parameters[row.megatron]) for row in rows]


@torch.no_grad()
def load_hf(model: Any, shape: ModelShape, folder: Path) -> None:
    """Set the parameters of this rank from a Hugging Face folder, loading one parameter at a time.

    Raises:
        RuntimeError: a tensor in the folder has another shape than the model's parameter.
    """
    rank, size = _tensor_parallel()
    with HFCheckpoint(folder) as checkpoint:
        for row, parameter in mapped_parameters(model, shape):
            full = mapping.to_megatron(row, {name: checkpoint.get(name) for name in row.hf}, shape)
            part = mapping.shard(row, full, rank, size)
            if part.shape != parameter.shape:
                raise RuntimeError(f"{row.hf}: {tuple(part.shape)} where {row.megatron} is {tuple(parameter.shape)}")
            parameter.copy_(part)


@torch.no_grad()
def hf_tensors(model: Any, shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The full weights by Hugging Face names, one tensor at a time, contiguous, on every tensor-parallel rank.

    A collective: all ranks of a tensor-parallel group must iterate to the end.
    """
    _, size = _tensor_parallel()
    group = parallel_state.get_tensor_model_parallel_group()
    for row, parameter in mapped_parameters(model, shape):
        part = parameter.detach().contiguous()
        parts = [part]
        if size > 1 and row.kind is not mapping.Kind.REPLICATED:
            parts = [torch.empty_like(part) for _ in range(size)]
            torch.distributed.all_gather(parts, part, group=group)
        yield from mapping.to_hf(row, mapping.unshard(row, parts), shape).items()


def _tensor_parallel() -> tuple[int, int]:
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
