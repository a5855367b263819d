"""Step 7 of 9 (train): what passes from samples to model and loss.

A micro-batch is flat: sequences stand one behind the other, and everything about response tokens is an array of T
elements, the responses of all sequences in order. So the loss knows nothing of padding, and the model chooses it.
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
    """What the model reads."""

    ids: Tensor
    """int64 [N]: prompt and response of each sequence, one sequence behind the other."""
    lengths: Tensor
    """int64 [n]: tokens of each sequence, prompt and response; they sum to N."""
    responses: Tensor
    """int64 [n]: response tokens of each sequence, its last ones; they sum to T."""
    temperature: Tensor
    """float32 [n]: what the engine divided logits by; 1 for greedy samples (S7)."""

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What the loss needs of the T response tokens, beside their logprobs under the current policy."""

    behaviour: Tensor
    """float32 [T]: logprob under which the token was drawn, μ."""
    proximal: Tensor
    """float32 [T]: logprob under the proximal policy, π_old; not read where it is the behaviour's or log-linear."""
    advantages: Tensor
    """float32 [T]: of the token, or its sample's repeated."""
    weights: Tensor
    """float32 [T]: share of the token in the step's loss, 0 where masked; over all micro-batches of a step they sum to
    about 1 (`losses.token_weights`)."""
    sequence: Tensor
    """int64 [T]: which sequence of the micro-batch, from 0."""
    age: Tensor
    """int64 [T]: the trainer's policy version − the version that drew the token."""
    kv: Tensor
    """int8 [T]: index into `PROVENANCE`."""
    count: int
    """Sequences in the micro-batch, n."""

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """As many sequences as go through the model at once."""

    sequences: Sequences
    tokens: Tokens

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return replace(self, sequences=self.sequences.to(device), tokens=self.tokens.to(device))


def _moved(fields: Any, device: torch.device) -> Any:
    tensors = {name: getattr(fields, name) for name in fields.__slots__}
    return replace(fields, **{k: v.to(device, non_blocking=True) for k, v in tensors.items() if isinstance(v, Tensor)})
