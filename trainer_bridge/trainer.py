"""The interface between the training loop and a trainer of any number of processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from trainer_bridge.batch import MicroBatch, Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.loss_stats import LossStats

TransportName = Literal["auto", "distributed", "tensor", "disk"]
"""`auto`: `tensor` if an engine shares the GPU of trainer rank 0, otherwise `distributed`."""
Part = Literal["weights", "optimizer"]
"""A part of the trainer's memory; `optimizer` includes the gradients."""
PARTS: tuple[Part, ...] = ("weights", "optimizer")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Model and optimiser. Raises `ValueError` for settings that contradict each other."""

    hf_checkpoint: Path
    """Hugging Face folder with the model's shape and initial weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tensor_model_parallel_size: int = 1
    world_size: int = 1
    """Number of ranks, a multiple of `tensor_model_parallel_size`."""
    recompute_granularity: Literal["full"] | None = None
    """`full`: layers keep only their inputs for the backward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if available."""
    lr: float = 1e-6
    lr_warmup_iters: int = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Gradient norm limit; 0: no clipping."""
    seed: int = 0
    offload: Literal["auto"] | bool = "auto"
    """Whether `Trainer.offload` moves memory; `auto`: on GPUs."""

    def __post_init__(self) -> None:
        if self.tensor_model_parallel_size < 1 or self.world_size % self.tensor_model_parallel_size:
            raise ValueError("world_size must be a multiple of tensor_model_parallel_size")


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStats:
    """Statistics of one step per response of a micro-batch, [n] each, on the CPU."""

    tokens: Tensor
    """int64: tokens in the loss."""
    clipped: Tensor
    """int64: tokens in the loss whose gradient is zero because of the clip."""
    masked: Tensor
    """int64: tokens in the loss that the correction masks."""
    pull: Tensor
    """float32: Σ |weight × correction × advantage| over the other tokens: the response's share of the gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One optimiser step."""

    loss: float
    grad_norm: float
    """Before clipping; NaN if the step was skipped."""
    applied: bool
    """False: the gradient was not finite, and weights and optimiser are unchanged."""
    lr: float
    stats: LossStats
    sequences: list[SequenceStats]
    """One per micro-batch, in the order given."""
    seconds: float


@dataclass(frozen=True, slots=True)
class PushReport:
    """One push to all engines."""

    version: int
    """Policy version of the engines after the push."""
    bytes: int
    """Size of the weights."""
    calls: int
    """Weight calls per engine."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration by phase: `begin`, `weights`, `end`."""


class Trainer(Protocol):
    """A trainer of one policy. Calls are made one at a time and return when all ranks are done."""

    def logprobs(self, sequences: Sequence[Sequences]) -> list[Tensor]:
        """log π of the response tokens of each micro-batch at its temperature, float32 [T] on the CPU."""

    def step(self, batches: Sequence[MicroBatch], loss: LossSettings) -> StepReport:
        """One optimiser step over all these micro-batches, distributed over the data-parallel ranks."""

    def connect(
        self, urls: Sequence[str], transport: TransportName = "distributed", api_key: str | None = None
    ) -> None:
        """Set the engines that pushes go to, replacing earlier ones. Raises: HandshakeError."""

    def push(self, version: int | None = None) -> PushReport:
        """Push the weights to all engines, as one push on each (`one-version-per-push`).

        Raises: PushFailed: the engines refuse rounds, with the reason, until a push succeeds.
        """

    def offload(self, *parts: Part) -> None:
        """Move these parts to the host and free their device memory for an engine on the same GPU."""

    def onload(self, *parts: Part) -> None:
        """Move these parts back to the device. Calls that need an offloaded part do this themselves."""

    def save(self, folder: Path) -> None:
        """Write weights, optimiser and random state, one file per rank; durable on return."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote with the same `world_size` and `tensor_model_parallel_size`."""

    def close(self) -> None:
        """Stop the trainer's processes and process groups."""
