"""JSON and msgpack bodies: what cannot be decoded is refused, and equal bodies are equal in both."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_april.api.errors import RequestError
from sglang_april.api.requests import RolloutBody, decode_rollout
from sglang_april.http.validation import check_rollout
from tests.unit.bodies import accept, one, refuse


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"",
        b"nul",
        b"{} {}",
        b"\xff",
        b'{"run": "\\ud800"}',
        b'{"run": "\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"quota": 01}',
    ],
)
def test_invalid_json_is_refused_as_the_body(data: bytes) -> None:
    if not data:
        assert decode_rollout(data, False) == RolloutBody()
        return
    with pytest.raises(RequestError, match=r"^body: "):
        decode_rollout(data, False)


@pytest.mark.parametrize("data", [b"\xc1", b"\x81", b"\x81\xa3run\xa1\xff", b"\x81\xa3run\xa9a", b"\x80\x80"])
def test_invalid_msgpack_is_refused_as_the_body(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"^body: "):
        decode_rollout(data, True)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RequestError, match="deep"):
        decode_rollout(b'{"prompts":[{"id":"a","metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", False)
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    assert refuse(one(metadata=deep)).field == "prompts[0].metadata"


@pytest.mark.parametrize("value", [b"raw", {1: 2}, {None: 1}, msgspec.msgpack.Ext(5, b"x"), [b""], {"a": {2: 3}}])
def test_metadata_without_a_json_form_is_refused(value: Any) -> None:
    assert refuse(one(metadata=value), packed=True).field == "prompts[0].metadata"


def test_raw_ids_equal_a_list() -> None:
    raw = np.array([1, 2], "<i4").tobytes()
    both = [accept({**one(input_ids=ids), "round_id": "r"}, packed=True) for ids in (raw, [1, 2])]
    assert both[0] == both[1]
    assert refuse(one(input_ids=raw[:5]), packed=True).field == "prompts[0].input_ids"
    assert refuse(one(input_ids=b""), packed=True).field == "prompts[0].input_ids"
    negative = np.array([3, -1], "<i4").tobytes()
    assert refuse(one(input_ids=negative), packed=True).field == "prompts[0].input_ids[1]"


def test_fingerprint_ignores_encoding_and_streaming() -> None:
    def fingerprint(body: dict[str, Any], packed: bool = False) -> str:
        body = {"round_id": "r", **body}
        data = msgspec.msgpack.encode(body) if packed else json.dumps(body).encode()
        return check_rollout(decode_rollout(data, packed), packed)

    raw = np.array([1], "<i4").tobytes()
    assert fingerprint(one()) == fingerprint({**one(), "stream": True}) == fingerprint(one(input_ids=raw), packed=True)
    assert fingerprint(one()) == fingerprint({**one(), "run": "default"})
    for other in ({**one(), "quota": 1}, {**one(), "quota": None}, one(metadata=1), one(n=2), one(input_ids=[2])):
        assert fingerprint(one()) != fingerprint(other)


def test_a_request_can_be_repeated_with_the_round_id_that_it_was_given() -> None:
    """An answer of a full disk names it."""
    body = {"run": "r", "prompts": []}
    first = decode_rollout(msgspec.json.encode(body), False)
    digest = check_rollout(first, False)
    assert first.round_id is not None
    again = decode_rollout(msgspec.json.encode({**body, "round_id": first.round_id}), False)
    assert check_rollout(again, False) == digest
