"""Micro-batches: the flat tensors that model and loss read.

The sequences of a micro-batch are concatenated, and everything about response tokens is an array of T elements, the
responses of all sequences in order. There is no padding.
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

PROVENANCE = ("fresh", "recomputed", "kept")
"""`Tokens.kv` holds indices into this."""
KEPT = PROVENANCE.index("kept")


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The inputs of the model."""

    ids: Tensor
    """int64 [N]: prompt and response of each sequence, concatenated."""
    lengths: Tensor
    """int64 [n]: tokens of each sequence, prompt and response; they sum to N."""
    responses: Tensor
    """int64 [n]: response tokens of each sequence, its last ones; they sum to T."""
    temperature: Tensor
    """float32 [n]: the temperature that divided the logits; 1 for greedy samples (`behaviour-logprobs`)."""

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device) -> Self:
        """A copy on a device."""
        return _on_device(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The inputs of the loss for the T response tokens, apart from their logprobs under the current policy."""

    behaviour: Tensor
    """float32 [T]: logprob under which the token was drawn, μ."""
    proximal: Tensor
    """float32 [T]: logprob under the proximal policy, π_old; unused with `proximal: behaviour` and `loglinear`."""
    advantages: Tensor
    """float32 [T]: advantage of the token, or of its sample."""
    weights: Tensor
    """float32 [T]: weight of the token in the step's loss, 0 where masked. Over all micro-batches of a step they sum to
    about 1 (`losses.token_weights`)."""
    sequence: Tensor
    """int64 [T]: index of the token's sequence in the micro-batch."""
    age: Tensor
    """int64 [T]: the trainer's policy version − the version that drew the token."""
    kv: Tensor
    """int8 [T]: index into `PROVENANCE`."""
    count: int
    """Sequences in the micro-batch, n."""

    def to(self, device: torch.device) -> Self:
        """A copy on a device."""
        return _on_device(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The sequences of one forward and backward pass."""

    sequences: Sequences
    tokens: Tokens

    def to(self, device: torch.device) -> Self:
        """A copy on a device."""
        return replace(self, sequences=self.sequences.to(device), tokens=self.tokens.to(device))


def _on_device(fields: Any, device: torch.device) -> Any:
    tensors = {name: getattr(fields, name) for name in fields.__slots__}
    return replace(fields, **{k: v.to(device, non_blocking=True) for k, v in tensors.items() if isinstance(v, Tensor)})
