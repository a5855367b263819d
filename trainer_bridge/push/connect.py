"""A pusher for a trainer and its engines."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from trainer_bridge.handshake import shake_hands
from trainer_bridge.megatron.shapes import ModelShape
from trainer_bridge.push.disk import DiskTransport
from trainer_bridge.push.distributed import DistributedTransport
from trainer_bridge.push.push_target import PushTarget
from trainer_bridge.push.pusher import Pusher, WeightTransport
from trainer_bridge.push.tensor import TensorTransport
from trainer_bridge.trainer import PushWay


def connect(
    engines: Sequence[str],
    way: PushWay,
    *,
    source: Path,
    device: torch.device,
    folder: Path | None = None,
    api_key: str | None = None,
) -> Pusher:
    """Shake hands with every engine (URL), and make a pusher for them.

    `source`: the trainer's Hugging Face folder; `folder`: where `disk` writes, seen by the engines under the same path.
    Raises `HandshakeError`.
    """
    if not engines:
        raise ValueError("no engine to push to")
    shape = ModelShape.read(source)
    known = [PushTarget(shake_hands(url.rstrip("/"), shape, api_key), api_key) for url in engines]
    made: WeightTransport
    if way == "distributed":
        made = DistributedTransport(known, device)
    elif way == "tensor":
        made = TensorTransport(known)
    elif way == "disk":
        made = DiskTransport(known, source, folder or Path(tempfile.mkdtemp(prefix="april-push-")) / "policy")
    else:
        raise ValueError(f"push must be distributed, tensor or disk, not {way!r}")
    return Pusher(known, made)
