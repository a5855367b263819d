"""Ray, for runs that ask for it (`ray: true`): trainer ranks and servers are its actors.

Only this module and the two that make actors (`ray_server.py`, `megatron/ray_ranks.py`) import Ray; they are imported
where it is asked for. No actor outlives the run: Ray ends them with the process that made them.
"""

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainer_bridge.config import ConfigError

PASSED_ON = ("SGLANG_", "OMP_", "PYTHON", "NCCL_", "GLOO_", "TORCH", "HF_", "TRITON_")
"""Environment variables that begin so reach every actor, also on machines whose Ray was started without them."""
OBJECTS_BYTES = 100_000_000
"""Of a Ray that is started here: what passes through it are a step's tokens and figures."""
PLACED_WITHIN_S = 300.0
"""Actors run within that, or the cluster has no room for them."""


class NoRoomError(ConfigError):
    """Ray has not started what was asked for."""


class RayCluster:
    """A Ray that runs already (`address`, as `ray.init` takes it), or one of our own, which ends with the run."""

    def __init__(self, address: str | None = None) -> None:
        self._ours = not ray.is_initialized()
        known = address or os.environ.get("RAY_ADDRESS")
        if self._ours and known:
            ray.init(known)
        elif self._ours:
            ray.init("local", include_dashboard=False, object_store_memory=OBJECTS_BYTES, logging_level="WARNING")
        self.has_gpus = ray.cluster_resources().get("GPU", 0) > 0

    def actor(self, kind: type, *args: Any, gpus: int, node: str | None = None) -> Any:
        """A new actor of a class; `gpus` are asked for where the cluster has any; `node`: there and nowhere else."""
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": gpus if self.has_gpus else 0,
            "max_restarts": 0,
            "runtime_env": {"env_vars": passed_on()},
        }
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(kind).options(**options).remote(*args)

    @staticmethod
    def wait_for(actors: Sequence[Any], what: str) -> None:
        """Until all of them run. Raises `NoRoomError`: Ray itself would wait for ever."""
        running, missing = ray.wait(
            [actor.__ray_ready__.remote() for actor in actors], num_returns=len(actors), timeout=PLACED_WITHIN_S
        )
        if missing:
            raise NoRoomError(
                f"ray: has started {len(running)} of {len(actors)} actors ({what}) within {PLACED_WITHIN_S:g} s; "
                f"it has {ray.cluster_resources().get('GPU', 0):g} GPUs"
            )

    def close(self) -> None:
        """End a Ray of our own, with all its processes."""
        if self._ours:
            ray.shutdown()


def passed_on() -> dict[str, str]:
    """The variables of this process that actors get."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
