"""The entry point `verl.plugins`: verl imports this module in each of its processes.

With `SGLANG_APRIL` in the environment of the job, the weight adapter of SGLang is replaced (`weights.py`); otherwise
nothing is. verl ignores a plugin that fails. `check_registered` finds a process without the variable; it cannot see
other processes, where the adapter is used. If it is missing there, the agent loops' client finds no step for the
version of a response, and raises (`agent_loop.AttachedClient`).

It also records, on the actor of each SGLang server, the training step of each policy version: a push of verl's
validation moves the version without a step, so the step cannot be computed from the version.
"""

import os
from typing import Any

ENV = "SGLANG_APRIL"
ADAPTER = "sglang_april.integrations.verl.weights.ServerAdapter"
NAME = ("sglang", "async")
"""Key of SGLang's weight adapter in verl's registry."""


def register() -> None:
    """Replace verl's weight adapter for SGLang."""
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY[NAME] = ADAPTER


def check_registered() -> None:
    """Raise unless `ServerAdapter` is the registered weight adapter of this process.

    This module registers it at its import if `SGLANG_APRIL` is set, so in such a process this raises only if something
    has replaced the adapter since.

    Raises:
        RuntimeError: `SGLANG_APRIL` is missing in the environment of this process, or another adapter is registered.
    """
    from verl.workers.rollout import base

    if base._ROLLOUT_REGISTRY[NAME] != ADAPTER:
        raise RuntimeError(
            f"sglang_april: verl's weight adapter for SGLang is not that of this plugin: set {ENV} in the runtime"
            " environment of the job, and leave VERL_USE_EXTERNAL_PLUGINS at 'auto'"
        )


def check_config(config: Any) -> None:
    """Raise unless attached requests can honour verl's configuration.

    `separate_async` starts with replicas on the GPUs of the trainer. It takes them off the balancer, pauses them and
    releases their memory at the first step, whatever `hybrid_rollout.enable_switch` is, and resumes them for a
    validation or when it lends them again, if ever. verl's own client sends their aborted requests to other replicas.
    Suspended requests would stay on them, and their prompts would never finish.

    Raises:
        ValueError: the sentence names the setting.
    """
    actor, trainer = config["actor_rollout_ref"], config.get("trainer") or {}
    if actor["rollout"].get("enable_rollout_routing_replay"):
        raise ValueError("sglang_april: actor_rollout_ref.rollout.enable_rollout_routing_replay is not supported")
    mode = (trainer.get("v1") or {}).get("trainer_mode")
    if mode == "separate_async" and actor.get("hybrid_engine", True):
        raise ValueError(
            "sglang_april: trainer.v1.trainer_mode=separate_async needs actor_rollout_ref.hybrid_engine=False: requests"
            " suspended on a replica that the trainer takes back would wait until it lends the replica again, if ever"
        )


def record_step(server: Any, version: int, step: int | None) -> None:
    """Record on the server's actor that `version` has the weights of this step; None: the server's own step."""
    if not hasattr(server, "april_steps"):
        server.april_steps = {}
    server.april_steps[version] = server.global_steps if step is None else step


def recorded_steps(server: Any) -> dict[int, int | None]:
    """Read from the server's actor the step of each version."""
    return dict(getattr(server, "april_steps", {}))


if os.environ.get(ENV):
    register()
