"""A policy in many weight calls, as trainers send it: SGLang's `/update_weights_from_tensor`, one bucket each."""

import base64
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.server import Server

Bucket = list[tuple[str, torch.Tensor]]


def buckets_of(model: Path, count: int) -> list[Bucket]:
    """All weights of a model's folder in `count` buckets, none of them empty."""
    weights = [item for file in sorted(model.glob("*.safetensors")) for item in load_file(file).items()]
    assert len(weights) >= count
    return [weights[i::count] for i in range(count)]


def misshapen(bucket: Bucket) -> Bucket:
    """The bucket with one row too many in its first weight."""
    (name, weight), *rest = bucket
    return [(name, torch.cat([weight, weight[:1]])), *rest]


def send(
    server: Server, bucket: Bucket | bytes, *, flush: bool = False, status: int = 200, **fields: Any
) -> dict[str, Any]:
    """One weight call to a server of one rank; bytes are sent as they are. `fields` are further ones of its body."""
    packed = bucket if isinstance(bucket, bytes) else pickle.dumps(bucket)
    server.loaded = Path("buckets")
    body = {"serialized_named_tensors": [base64.b64encode(packed).decode()], "flush_cache": flush, **fields}
    return dict(server.post("/update_weights_from_tensor", body, status=status))
