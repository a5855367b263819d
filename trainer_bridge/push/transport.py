"""Weight buckets, and the interface of the transports that carry them to the engines."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WeightBucket:
    """Several tensors in one contiguous buffer."""

    names: list[str]
    dtypes: list[str]
    """As attributes of torch: `float32`, `bfloat16`."""
    shapes: list[list[int]]
    flat: Tensor
    """uint8: the bytes of the tensors in this order, without gaps, as SGLang's `flattened_bucket` expects them."""

    @classmethod
    def of(cls, tensors: list[tuple[str, Tensor]]) -> "WeightBucket":
        """A bucket with copies of these tensors."""
        return cls(
            names=[name for name, _ in tensors],
            dtypes=[str(x.dtype).removeprefix("torch.") for _, x in tensors],
            shapes=[list(x.shape) for _, x in tensors],
            flat=torch.cat([x.detach().contiguous().reshape(-1).view(torch.uint8) for _, x in tensors]),
        )

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors as views of the buffer."""
        start = 0
        for name, dtype_name, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            end = start + dtype.itemsize * torch.Size(shape).numel()
            yield name, self.flat[start:end].view(dtype).reshape(shape)
            start = end


class WeightTransport(Protocol):
    """Carries the buckets of a push to all engines. Any method may raise one of `pusher.PUSH_ERRORS`."""

    def open(self) -> None:
        """Prepare for the first bucket of a push; recreates whatever an earlier failure destroyed."""

    def send(self, bucket: WeightBucket) -> None:
        """Send a bucket to all engines; returns when all have loaded it."""

    def finish(self) -> None:
        """Complete the push after its last bucket."""

    def abort(self) -> None:
        """Discard all state after a failed push."""

    def close(self) -> None:
        """Release all resources."""
