"""Trainer ranks as Ray actors, on one machine or on several: a GPU each where there are any."""

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from trainer_bridge.megatron.worker import Outcome, RemoteWorker
from trainer_bridge.megatron.workers import RemoteWorkers, WorkerDied
from trainer_bridge.ports import free_port
from trainer_bridge.ray_cluster import RayCluster
from trainer_bridge.trainer import TrainerSettings


class WorkerActor(RemoteWorker):
    """The actor of one rank."""

    def meeting_point(self) -> str:
        """Where the ranks may find each other, if this is rank 0."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{free_port(host)}"


class RayWorkers(RemoteWorkers):
    """Ranks in actors. A call that an actor does not survive is heard of from Ray."""

    def __init__(self, settings: TrainerSettings, cluster: RayCluster) -> None:
        super().__init__(settings.world_size)
        gpus = 0 if settings.device == "cpu" else 1
        self.actors = [cluster.actor(WorkerActor, settings, rank, gpus=gpus) for rank in range(self._size)]
        cluster.wait_for(self.actors, "trainer ranks")
        init_method = ray.get(self.actors[0].meeting_point.remote())
        self._calls: list[Any] = [actor.join.remote(init_method) for actor in self.actors]
        self._answers()

    def _send(self, rank: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            self._calls[rank] = self.actors[rank].do.remote(method, args)
        except RayActorError as died:
            raise WorkerDied from died

    def _ready(self, ranks: Sequence[int], timeout: float | None) -> list[int]:
        calls = [self._calls[rank] for rank in ranks]
        ready, _ = ray.wait(calls, timeout=timeout)
        return [rank for rank, call in zip(ranks, calls, strict=True) if call in ready]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer: Outcome = ray.get(self._calls[rank])
        except RayActorError as died:
            raise WorkerDied(str(died)) from died
        return answer

    def _kill(self) -> None:
        for actor in self.actors:
            with contextlib.suppress(RayActorError):
                ray.kill(actor)
