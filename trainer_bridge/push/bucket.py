"""Tensors of a push, several in one flat piece of memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class WeightBucket:
    """Some tensors, one behind the other."""

    names: list[str]
    dtypes: list[str]
    """As attributes of torch: `float32`, `bfloat16`."""
    shapes: list[list[int]]
    flat: Tensor
    """uint8: the tensors' bytes in this order, without gaps, as SGLang's `flattened_bucket` has them."""

    @classmethod
    def of(cls, tensors: list[tuple[str, Tensor]]) -> "WeightBucket":
        """Tensors copied into one."""
        return cls(
            names=[name for name, _ in tensors],
            dtypes=[str(x.dtype).removeprefix("torch.") for _, x in tensors],
            shapes=[list(x.shape) for _, x in tensors],
            flat=torch.cat([x.detach().contiguous().reshape(-1).view(torch.uint8) for _, x in tensors]),
        )

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, without a copy."""
        start = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind = getattr(torch, dtype)
            end = start + kind.itemsize * torch.Size(shape).numel()
            yield name, self.flat[start:end].view(kind).reshape(shape)
            start = end
