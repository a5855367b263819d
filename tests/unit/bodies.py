"""Request bodies, decoded and checked as the service does."""

import json
from typing import Any

import msgspec
import pytest

from sglang_april.api.errors import RequestError
from sglang_april.api.requests import decode_rollout
from sglang_april.config import AprilConfig
from sglang_april.http.prepare import open_round, round_spec
from sglang_april.http.validation import check_rollout
from tests.unit.scripted_engine import ScriptedEngine


def accept(body: dict[str, Any], packed: bool = False, **server: Any) -> Any:
    """Decode, check and prepare, as the service does; the command to the scheduler."""
    data = msgspec.msgpack.encode(body) if packed else json.dumps(body).encode()
    rollout = decode_rollout(data, packed)
    config, digest = AprilConfig(quota=8), check_rollout(rollout, packed)
    return open_round(1, round_spec(rollout, "r", digest, config), rollout, config, ScriptedEngine(**server))


def refuse(body: dict[str, Any], packed: bool = False, **server: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        accept(body, packed, **server)
    assert caught.value.status == 400
    assert caught.value.reason
    return caught.value


def one(**fields: Any) -> dict[str, Any]:
    return {"prompts": [{"id": "a", "input_ids": [1], **fields}]}


def params(**fields: Any) -> dict[str, Any]:
    return one(sampling_params=fields)
