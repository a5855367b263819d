"""Steps 7 and 8 of 9 (train, push): what the loop sees of a trainer, however many processes it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from trainer_bridge.batch import MicroBatch, Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.loss_stats import LossStats

PushWay = Literal["distributed", "tensor", "disk"]
Part = Literal["weights", "optimizer"]
"""Of a trainer's memory; gradients go with the optimiser."""
PARTS: tuple[Part, ...] = ("weights", "optimizer")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Model and optimiser; names as slime's users know them."""

    hf_checkpoint: Path
    """Folder of a Hugging Face model: shape and first weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    tensor_model_parallel_size: int = 1
    world_size: int = 1
    """Trainer processes; a multiple of `tensor_model_parallel_size`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a device."""
    lr: float = 1e-6
    lr_warmup_iters: int = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest gradient norm; 0: no clip."""
    seed: int = 0
    offload: Literal["auto"] | bool = "auto"
    """Whether `Trainer.offload` moves anything; `auto`: on a GPU."""

    def __post_init__(self) -> None:
        if self.tensor_model_parallel_size < 1 or self.world_size % self.tensor_model_parallel_size:
            raise ValueError("world_size must be a multiple of tensor_model_parallel_size")


@dataclass(frozen=True, slots=True, eq=False)
class SequenceFigures:
    """What one step did with each response of a micro-batch, [n] each, on the CPU."""

    tokens: Tensor
    """int64: tokens in the loss."""
    clipped: Tensor
    """int64: of them, without gradient because the clip holds."""
    masked: Tensor
    """int64: of them, masked by the correction."""
    pull: Tensor
    """float32: Σ |weight × correction × advantage| over tokens that are neither: how hard it pulls at the gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """One optimiser step."""

    loss: float
    grad_norm: float
    """Before clipping; NaN where the step was left out."""
    applied: bool
    """False: the gradient was not finite, and weights and optimiser are as before."""
    lr: float
    stats: LossStats
    sequences: list[SequenceFigures]
    """One per micro-batch, in the order given."""
    seconds: float


@dataclass(frozen=True, slots=True)
class PushReport:
    """One push to all engines."""

    version: int
    """The engines' policy version now."""
    bytes: int
    """Of weights, once."""
    calls: int
    """Weight calls to each engine."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part: `begin`, `weights`, `end`."""


class Trainer(Protocol):
    """A policy that learns. Calls come one at a time and return when all ranks have done them."""

    def logprobs(self, sequences: Sequence[Sequences]) -> list[Tensor]:
        """log π of the response tokens of each micro-batch, float32 [T] on the CPU, at its temperature (S7)."""

    def step(self, batches: Sequence[MicroBatch], loss: LossSettings) -> StepReport:
        """One optimiser step over all these micro-batches, shared out over the data-parallel ranks."""

    def connect(self, engines: Sequence[str], way: PushWay = "distributed", api_key: str | None = None) -> None:
        """Engines (URLs) that pushes go to, after the handshake (`handshake.py`); replaces earlier ones."""

    def push(self, version: int | None = None) -> PushReport:
        """The weights to all engines, between `/april/push/begin` and `/end` (S1).

        Raises `PushFailed`: the engines then refuse rounds with the reason until a push succeeds.
        """

    def offload(self, *parts: Part) -> None:
        """Free the device memory of these parts: an engine on the same GPU wants it. They wait on the host."""

    def onload(self, *parts: Part) -> None:
        """Bring these parts back. Calls that need one that is away do so by themselves."""

    def save(self, folder: Path) -> None:
        """Weights, optimiser and random state into a folder, one file a rank; durable when it returns."""

    def load(self, folder: Path) -> None:
        """What `save` wrote, with the same `world_size` and `tensor_model_parallel_size`."""

    def export(self, folder: Path) -> None:
        """The policy as a Hugging Face folder, with the tokenizer of `hf_checkpoint`."""

    def close(self) -> None:
        """End the trainer's processes and groups."""
