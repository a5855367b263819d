"""Trainer ranks as Ray actors, on one machine or several, each with a GPU if the cluster has any."""

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from trainer_bridge.megatron.worker import Outcome, RemoteWorker
from trainer_bridge.megatron.workers import RemoteWorkers, WorkerDied
from trainer_bridge.ray_cluster import RayCluster
from trainer_bridge.server_process import free_port
from trainer_bridge.trainer import TrainerSettings


class WorkerActor(RemoteWorker):
    """The actor of one rank."""

    def rendezvous(self) -> str:
        """An `init_method` for all ranks, on the machine of this one."""
        host = ray.util.get_node_ip_address()
        return f"tcp://{host}:{free_port(host)}"


class RayWorkers(RemoteWorkers):
    """Ranks in actors. Ray reports the death of an actor as the result of its call."""

    def __init__(self, settings: TrainerSettings, cluster: RayCluster) -> None:
        super().__init__(settings.world_size)
        gpus = 0 if settings.device == "cpu" else 1
        self.actors = [cluster.create_actor(WorkerActor, settings, rank, gpus=gpus) for rank in range(self._size)]
        cluster.wait_for(self.actors, "trainer ranks")
        init_method = ray.get(self.actors[0].rendezvous.remote())
        self._calls: list[Any] = [actor.join.remote(init_method) for actor in self.actors]
        self._receive_all()

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
