"""Before a run: is this the engine that the trainer can push to? One sentence says why not."""

from dataclasses import dataclass
from typing import Any

import httpx

from sglang_april import __version__
from sglang_april.client import AprilClient, AprilError
from trainer_bridge.megatron.shapes import ARCHITECTURES, ModelShape


class HandshakeError(RuntimeError):
    """An engine that this trainer must not be connected to."""


class NoEngineError(HandshakeError):
    """Nobody answers there."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a trainer has to know of an engine it was let in by."""

    url: str
    tp_size: int
    policy_version: int
    sglang: str
    """SGLang's version."""


def shake_hands(url: str, shape: ModelShape, api_key: str | None = None) -> EngineFacts:
    """Ask an engine what it is. Raises `HandshakeError`: unreachable, not patched, another version, another model."""
    try:
        with AprilClient(url, api_key) as client:
            state = client.state()
    except httpx.TransportError as error:
        raise NoEngineError(f"no engine answers at {url}: {error}") from error
    except AprilError as error:
        raise HandshakeError(f"{url}: {error.reason}") from error
    return check_engine(url, state, shape)


def check_engine(url: str, state: dict[str, Any], shape: ModelShape) -> EngineFacts:
    """The same from the contents of `GET /april/state`."""
    hooks, model = state["http"]["hooks"], state["http"].get("model") or {}
    if not hooks:
        raise HandshakeError(f"the engine at {url} runs without sglang-april's hooks")
    if hooks["april"] != __version__:
        raise HandshakeError(f"the engine at {url} has sglang-april {hooks['april']}, the trainer {__version__}")
    for name, ours in _expected(shape).items():
        if model.get(name) != ours:
            raise HandshakeError(f"the engine at {url} has {name} {model.get(name)}, the trainer's model has {ours}")
    return EngineFacts(url, model["tp_size"], state["policy_version"], hooks["sglang"])


def _expected(shape: ModelShape) -> dict[str, Any]:
    return {
        "architecture": ARCHITECTURES[shape.family],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
    }
