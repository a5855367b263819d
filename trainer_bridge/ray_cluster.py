"""The Ray cluster of a run with `ray: true`, in which trainer ranks and servers are actors.

Only this module and the two that define actors (`ray_server.py`, `megatron/ray_workers.py`) import Ray, and they are
imported on demand. No actor outlives the run, because Ray stops actors with the process that created them.
"""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer_bridge.config import ConfigError

FORWARDED_PREFIXES = ("SGLANG_", "OMP_", "PYTHON", "NCCL_", "GLOO_", "TORCH", "HF_", "TRITON_")
"""Environment variables with these prefixes are passed to every actor, on all machines."""
OBJECT_STORE_BYTES = 100_000_000
"""Object store of a Ray that is started here: the tokens and statistics of a step pass through it."""
PLACEMENT_TIMEOUT_S = 300.0
"""Seconds for actors to start; after that the cluster is considered full."""


class ClusterCapacityError(ConfigError):
    """Ray has not started the requested actors in time."""


class RayCluster:
    """A running Ray (`address`, as for `ray.init`), or one that is started here and shut down with the run."""

    def __init__(self, address: str | None = None) -> None:
        self._started_here = not ray.is_initialized()
        address = address or os.environ.get("RAY_ADDRESS")
        if self._started_here and address:
            ray.init(address)
        elif self._started_here:
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, logging_level="WARNING")
        self.has_gpus = ray.cluster_resources().get("GPU", 0) > 0

    def create_actor(self, kind: type, *args: Any, gpus: int, node: str | None = None) -> Any:
        """A new actor. `gpus` are requested if the cluster has any; `node`: the only node that may run it."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus if self.has_gpus else 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": forwarded_environment()},
        }
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(kind).options(**options).remote(*args)

    @staticmethod
    def wait_for(actors: Sequence[Any], what: str) -> None:
        """Wait until all actors run. Raises: ClusterCapacityError: on timeout; Ray itself would wait forever."""
        running, missing = ray.wait(
            [actor.__ray_ready__.remote() for actor in actors], num_returns=len(actors), timeout=PLACEMENT_TIMEOUT_S
        )
        if missing:
            raise ClusterCapacityError(
                f"ray: started only {len(running)} of {len(actors)} actors ({what}) within {PLACEMENT_TIMEOUT_S:g} s; "
                f"the cluster has {ray.cluster_resources().get('GPU', 0):g} GPUs"
            )

    def close(self) -> None:
        """Shut down a Ray that was started here."""
        if self._started_here:
            ray.shutdown()


def forwarded_environment() -> dict[str, str]:
    """The environment variables of this process that actors get."""
    return {name: value for name, value in os.environ.items() if name.startswith(FORWARDED_PREFIXES)}
