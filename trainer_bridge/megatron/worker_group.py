"""All ranks of a trainer behind the `Trainer` interface. Every call gives each rank its share and waits for all."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from trainer_bridge.batch import MicroBatch, Sequences
from trainer_bridge.loss_settings import LossSettings
from trainer_bridge.megatron.worker import Worker
from trainer_bridge.megatron.workers import InProcessWorkers, ProcessWorkers, Workers
from trainer_bridge.trainer import Part, PushReport, StepReport, TrainerSettings, TransportName

if TYPE_CHECKING:
    from trainer_bridge.ray_cluster import RayCluster

T = TypeVar("T")


def make_trainer(settings: TrainerSettings, cluster: "RayCluster | None" = None) -> "WorkerGroup":
    """A trainer of `world_size` ranks: Ray actors if there is a cluster, else this process (for 1) or processes."""
    if cluster is not None:
        from trainer_bridge.megatron.ray_workers import RayWorkers

        return WorkerGroup(settings, RayWorkers(settings, cluster))
    return WorkerGroup(
        settings, InProcessWorkers(Worker(settings)) if settings.world_size == 1 else ProcessWorkers(settings)
    )


class WorkerGroup:
    """A `Trainer` over several ranks."""

    def __init__(self, settings: TrainerSettings, workers: Workers) -> None:
        self.settings, self.workers = settings, workers
        self._replicas = settings.world_size // settings.tensor_model_parallel_size

    def logprobs(self, sequences: Sequence[Sequences]) -> list[Tensor]:
        """As `Trainer.logprobs`."""
        results = self.workers.call("logprobs", [(part,) for part in self._shares(sequences)])
        return self._merge_shares([results[rank] for rank in self._replica_ranks()], len(sequences))

    def step(self, batches: Sequence[MicroBatch], loss: LossSettings) -> StepReport:
        """As `Trainer.step`."""
        results = self.workers.call("step", [(part, loss) for part in self._shares(batches)])
        sequences = [results[rank].sequences for rank in self._replica_ranks()]
        return replace(results[0], sequences=self._merge_shares(sequences, len(batches)))

    def connect(
        self, urls: Sequence[str], transport: TransportName = "distributed", api_key: str | None = None
    ) -> None:
        """As `Trainer.connect`."""
        self.workers.call("connect", self._broadcast(urls, transport, api_key))

    def push(self, version: int | None = None) -> PushReport:
        """As `Trainer.push`."""
        return self.workers.call("push", self._broadcast(version))[0]

    def offload(self, *parts: Part) -> None:
        """As `Trainer.offload`."""
        self.workers.call("offload", self._broadcast(*parts))

    def onload(self, *parts: Part) -> None:
        """As `Trainer.onload`."""
        self.workers.call("onload", self._broadcast(*parts))

    def save(self, folder: Path) -> None:
        """As `Trainer.save`."""
        self.workers.call("save", self._broadcast(folder))

    def load(self, folder: Path) -> None:
        """As `Trainer.load`."""
        self.workers.call("load", self._broadcast(folder))

    def close(self) -> None:
        """As `Trainer.close`."""
        self.workers.close()

    def _broadcast(self, *args: Any) -> list[tuple[Any, ...]]:
        return [args] * self.settings.world_size

    def _replica_ranks(self) -> range:
        """The first rank of each data-parallel replica; tensor-parallel ranks are adjacent."""
        return range(0, self.settings.world_size, self.settings.tensor_model_parallel_size)

    def _shares(self, items: Sequence[T]) -> list[list[T]]:
        """The items of each rank: item i goes to replica i mod replicas."""
        size = self.settings.tensor_model_parallel_size
        return [list(items[rank // size :: self._replicas]) for rank in range(self.settings.world_size)]

    @staticmethod
    def _merge_shares(parts: Sequence[Sequence[T]], count: int) -> list[T]:
        """The inverse of `_shares`, from one list per replica."""
        iterators = [iter(part) for part in parts]
        return [next(iterators[i % len(parts)]) for i in range(count)]
