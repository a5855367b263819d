"""Servers of a run in Ray actors. The actor owns the server process; if one dies, so does the other."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayError

from trainer_bridge.ray_cluster import ClusterCapacityError, RayCluster, forwarded_environment
from trainer_bridge.server_process import EngineGoneError, LocalServerProcess


class ServerActor:
    """Runs the server process. First stops what is left of a server that an earlier actor ran on this machine."""

    def __init__(self, record: Path, forwarded: Sequence[str]) -> None:
        """`forwarded`: names of the environment variables that the user set."""
        if "OMP_NUM_THREADS" not in forwarded:
            os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it for its workers; it does not fit a server
        LocalServerProcess(record).end()
        self._server = LocalServerProcess(record, die_with_parent=True)

    def location(self) -> tuple[str, str]:
        """The id of this node, and an unused URL on it."""
        return ray.get_runtime_context().get_node_id(), self._server.new_url(ray.util.get_node_ip_address())

    def alive(self) -> bool:
        """As `LocalServerProcess.alive`."""
        return self._server.alive

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """As `LocalServerProcess.start`."""
        self._server.start(command, url, log)

    def end(self) -> None:
        """As `LocalServerProcess.end`."""
        self._server.end()


class RayServer:
    """A `ServerProcess` on the node that Ray chose. It stays on that node, because its journal and URL do."""

    url: str | None = None
    """Always None: under Ray no server outlives its trainer. The next trainer resumes from the journal."""

    def __init__(self, record: Path, cluster: RayCluster, gpus: int) -> None:
        self._record, self._cluster, self._gpus = record, cluster, gpus
        self._place(None)
        self._node, self._url = ray.get(self.actor.location.remote())

    def _place(self, node: str | None) -> None:
        """Create the actor, and wait until it runs."""
        forwarded = sorted(forwarded_environment())
        self._placed = False
        self.actor = self._cluster.create_actor(ServerActor, self._record, forwarded, gpus=self._gpus, node=node)
        self._cluster.wait_for([self.actor], "a server")
        self._placed = True

    def new_url(self) -> str:
        """As `ServerProcess.new_url`."""
        return str(self._url)

    @property
    def alive(self) -> bool:
        """As `ServerProcess.alive`; False if the actor has died."""
        try:
            return bool(ray.get(self.actor.alive.remote()))
        except RayActorError:
            return False

    def start(self, command: Sequence[str], url: str, log: Path) -> None:
        """As `ServerProcess.start`, in a new actor if the last one has died."""
        try:
            ray.get(self.actor.start.remote(command, url, log))
        except RayActorError:
            try:
                self._place(self._node)
                ray.get(self.actor.start.remote(command, url, log))
            except (RayError, ClusterCapacityError) as error:
                raise EngineGoneError(f"Ray cannot restart the server at {url}: {error}") from error

    def end(self) -> None:
        """As `ServerProcess.end`. A `start` that waits for a place fails at once."""
        with contextlib.suppress(RayError):
            if self._placed:
                ray.get(self.actor.end.remote())
        ray.kill(self.actor)
