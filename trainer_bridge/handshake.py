"""Checks, before a run, that an engine fits the trainer: plugin, version and model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_april import PROTOCOL
from sglang_april.client import AprilClient, AprilError, ServerLostError
from trainer_bridge.megatron.shapes import ARCHITECTURES, ModelShape


class HandshakeError(RuntimeError):
    """An engine that does not fit the trainer."""


class EngineUnreachableError(HandshakeError):
    """No engine answers at the URL."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The part of an engine's state that the trainer uses."""

    url: str
    tp_size: int
    policy_version: int
    sglang: str
    """Version of SGLang."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of its ranks; empty on a CPU."""


def shake_hands(url: str, shape: ModelShape, api_key: str | None = None) -> EngineInfo:
    """Read an engine's state and check it.

    Raises: EngineUnreachableError; HandshakeError: no plugin, another version of it, or another model.
    """
    try:
        with AprilClient(url, api_key) as client:
            state = client.state()
    except ServerLostError as error:
        raise EngineUnreachableError(f"no engine answers at {url}: {error.reason}") from error
    except AprilError as error:
        raise HandshakeError(f"{url}: {error.reason}") from error
    return check_engine(url, state, shape)


def check_engine(url: str, state: dict[str, Any], shape: ModelShape) -> EngineInfo:
    """Check the contents of `GET /april/state`. Raises: HandshakeError."""
    hooks, model = state["http"]["hooks"], state["http"].get("model") or {}
    if not hooks:
        raise HandshakeError(f"the engine at {url} runs without sglang-april's hooks")
    if hooks["protocol"] != PROTOCOL:
        raise HandshakeError(f"the engine at {url} has protocol {hooks['protocol']}, the trainer {PROTOCOL}")
    for name, expected in _expected_model(shape).items():
        if model.get(name) != expected:
            raise HandshakeError(
                f"the engine at {url} has {name} {model.get(name)}, the trainer's model has {expected}"
            )
    return EngineInfo(url, model["tp_size"], state["policy_version"], hooks["sglang"], tuple(state["gpus"]))


def check_colocated(url: str, state: dict[str, Any]) -> None:
    """Check that an engine on GPUs gives memory back. Raises: HandshakeError: without this flag SGLang keeps it."""
    if state["gpus"] and not state["http"]["model"]["memory_saver"]:
        raise HandshakeError(
            f"colocate: the engine at {url} would keep its GPU memory; start it with --enable-memory-saver"
        )


def shared_gpu(trainer: str, engines: Sequence[EngineInfo]) -> str:
    """Why trainer rank 0 and all engines cannot be one NCCL group; empty if each rank has a separate GPU.

    Args:
        trainer: UUID of the GPU of trainer rank 0; empty on a CPU.
        engines: the engines of the group.
    """
    owner = {trainer: "the trainer"} if trainer else {}
    for engine in engines:
        for gpu in engine.gpus:
            if gpu in owner:
                shared = f"the engine at {engine.url} shares GPU {gpu} with {owner[gpu]}"
                return f"{shared}; NCCL does not support two ranks on one GPU"
            owner[gpu] = f"the engine at {engine.url}"
    return ""


def _expected_model(shape: ModelShape) -> dict[str, Any]:
    return {
        "architecture": ARCHITECTURES[shape.family],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
    }
