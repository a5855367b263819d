"""Step 7 of 9 (train): all ranks of a trainer behind the calls of `trainer.Trainer`.

The caller sends each rank its share and waits for all (`ranks.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from trainer_bridge.batch import MicroBatch, Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.megatron.worker import Worker
from trainer_bridge.megatron.workers import InProcessWorkers, ProcessWorkers, Workers
from trainer_bridge.trainer import Part, PushReport, PushWay, StepReport, TrainerSettings

if TYPE_CHECKING:
    from trainer_bridge.ray_cluster import RayCluster

T = TypeVar("T")


def make_trainer(settings: TrainerSettings, cluster: "RayCluster | None" = None) -> "WorkerGroup":
    """A trainer of `world_size` ranks: actors of a cluster if there is one, else this process (for 1) or as many."""
    if cluster is not None:
        from trainer_bridge.megatron.ray_workers import RayWorkers

        return WorkerGroup(settings, RayWorkers(settings, cluster))
    return WorkerGroup(
        settings, InProcessWorkers(Worker(settings)) if settings.world_size == 1 else ProcessWorkers(settings)
    )


class WorkerGroup:
    """A `trainer.Trainer`."""

    def __init__(self, settings: TrainerSettings, ranks: Workers) -> None:
        self.settings, self._ranks = settings, ranks
        self._replicas = settings.world_size // settings.tensor_model_parallel_size

    def logprobs(self, sequences: Sequence[Sequences]) -> list[Tensor]:
        """As `Trainer.logprobs`."""
        answers = self._ranks.call("logprobs", [(part,) for part in self._shares(sequences)])
        return self._in_order([answers[rank] for rank in self._leaders()], len(sequences))

    def step(self, batches: Sequence[MicroBatch], loss: LossSettings) -> StepReport:
        """As `Trainer.step`."""
        answers = self._ranks.call("step", [(part, loss) for part in self._shares(batches)])
        figures = [answers[rank].sequences for rank in self._leaders()]
        return replace(answers[0], sequences=self._in_order(figures, len(batches)))

    def connect(self, engines: Sequence[str], way: PushWay = "distributed", api_key: str | None = None) -> None:
        """As `Trainer.connect`."""
        self._ranks.call("connect", self._same(engines, way, api_key))

    def push(self, version: int | None = None) -> PushReport:
        """As `Trainer.push`."""
        return self._ranks.call("push", self._same(version))[0]

    def offload(self, *parts: Part) -> None:
        """As `Trainer.offload`."""
        self._ranks.call("offload", self._same(*parts))

    def onload(self, *parts: Part) -> None:
        """As `Trainer.onload`."""
        self._ranks.call("onload", self._same(*parts))

    def save(self, folder: Path) -> None:
        """As `Trainer.save`."""
        self._ranks.call("save", self._same(folder))

    def load(self, folder: Path) -> None:
        """As `Trainer.load`."""
        self._ranks.call("load", self._same(folder))

    def export(self, folder: Path) -> None:
        """As `Trainer.export`."""
        self._ranks.call("export", self._same(folder))

    def close(self) -> None:
        """As `Trainer.close`."""
        self._ranks.close()

    def _same(self, *args: Any) -> list[tuple[Any, ...]]:
        return [args] * self.settings.world_size

    def _leaders(self) -> range:
        """One rank of each data-parallel replica: tensor-parallel ranks are neighbours."""
        return range(0, self.settings.world_size, self.settings.tensor_model_parallel_size)

    def _shares(self, work: Sequence[T]) -> list[list[T]]:
        """Each rank's part: micro-batch i goes to replica i mod replicas."""
        size = self.settings.tensor_model_parallel_size
        return [list(work[rank // size :: self._replicas]) for rank in range(self.settings.world_size)]

    @staticmethod
    def _in_order(parts: Sequence[Sequence[T]], count: int) -> list[T]:
        """The inverse of `_shares`, from one list per replica."""
        iterators = [iter(part) for part in parts]
        return [next(iterators[i % len(parts)]) for i in range(count)]
