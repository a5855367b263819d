"""A server of the run in a Ray actor: the actor holds its process, and neither lives without the other."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from trainer_bridge.ray_cluster import NoRoomError, RayCluster, passed_on
from trainer_bridge.server_process import EngineGoneError, LocalServerProcess


class ServerActor:
    """Beside the server's process; what is left of one that an earlier actor held on this machine is ended first."""

    def __init__(self, record: Path, given: Sequence[str]) -> None:
        if "OMP_NUM_THREADS" not in given:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray's own choice for its workers, not the user's for a server
        LocalServerProcess(record).end()
        self._own = LocalServerProcess(record, tied=True)

    def place(self) -> tuple[str, str]:
        """The node it is on, and a URL there."""
        return ray.get_runtime_context().get_node_id(), self._own.new_url(ray.util.get_node_ip_address())

    def alive(self) -> bool:
        """As `LocalServerProcess.alive`."""
        return self._own.alive

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """As `LocalServerProcess.start`."""
        self._own.start(command, url, log)

    def end(self) -> None:
        """As `LocalServerProcess.end`."""
        self._own.end()


class RayServer:
    """A `ServerProcess` on whatever machine Ray chose; it stays there, as its journal and its URL do."""

    url: str | None = None
    """No server outlives its trainer here: what the next one goes on from is the journal."""

    def __init__(self, record: Path, cluster: RayCluster, gpus: int) -> None:
        self._record, self._cluster, self._gpus = record, cluster, gpus
        self._actor = self._make(None)
        self._node, self._url = ray.get(self._actor.place.remote())

    def _make(self, node: str | None) -> Any:
        actor = self._cluster.actor(ServerActor, self._record, sorted(passed_on()), gpus=self._gpus, node=node)
        self._cluster.wait_for([actor], "a server")
        return actor

    def new_url(self) -> str:
        """As `ServerProcess.new_url`."""
        return str(self._url)

    @property
    def alive(self) -> bool:
        """As `ServerProcess.alive`; a server whose actor has died is dead."""
        try:
            return bool(ray.get(self._actor.alive.remote()))
        except RayActorError:
            return False

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """As `ServerProcess.start`, in a new actor if the last one has died."""
        try:
            ray.get(self._actor.start.remote(command, url, log))
        except RayActorError:
            try:
                self._actor = self._make(self._node)
                ray.get(self._actor.start.remote(command, url, log))
            except (RayError, NoRoomError) as error:
                raise EngineGoneError(f"Ray starts no server at {url} any more: {error}") from error

    def end(self) -> None:
        """As `ServerProcess.end`."""
        with contextlib.suppress(RayActorError):
            ray.get(self._actor.end.remote())
        ray.kill(self._actor)
