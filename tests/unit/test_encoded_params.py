"""Sampling parameters in messages and journals: what one SGLang release has encoded, another one reads."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_april.adapter.core import encoded_params
from sglang_april.adapter.core.encoded_params import decode_params, encode_params
from sglang_april.adapter.core.restart import _check_params
from sglang_april.recovery.journal import JournalError
from sglang_april.recovery.journal_snapshot import JournalSnapshot, SnapshotGroup, SnapshotSample
from tests.unit.journal_fixtures import request

GIVEN: dict[str, Any] = {
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_k": 9,
    "stop": ["END", "\n\n"],
    "stop_token_ids": [3, 5],
    "stop_regex": "a+",
    "logit_bias": {"7": 2, "300": -3.5},
    "min_new_tokens": 2,
    "json_schema": '{"type": "object"}',
    "custom_params": {"list": [1, None, "x"], "nested": {"a": 0.5}},
    "sampling_seed": 11,
    "skip_special_tokens": False,
}


def normalised(**given: Any) -> SamplingParams:
    params = SamplingParams(**given)
    params.normalize(SimpleNamespace(encode=lambda text, **_: list(text.encode())))
    return params


def other_release(*, without: str = "", **defaults: Any) -> type[SamplingParams]:
    """A release whose fields have the opposite order, which lacks one, and which has other defaults."""
    fields = [f for f in msgspec.structs.fields(SamplingParams) if f.name != without]
    array_like = not SamplingParams.__struct_config__.array_like
    listed = [(f.name, f.type, defaults.get(f.name, f.default)) for f in reversed(fields)]
    return msgspec.defstruct("SamplingParams", [*listed, ("newest", int, 0)], kw_only=True, array_like=array_like)


@pytest.mark.parametrize("given", [{}, GIVEN, {"max_new_tokens": None}], ids=["defaults", "all kinds", "null"])
def test_parameters_come_back_as_they_were(given: dict[str, Any]) -> None:
    params = normalised(**given)
    assert decode_params(encode_params(params)) == params


def test_another_release_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has another default: the release that encoded them meant its own default."""
    params = normalised(**GIVEN)
    data = encode_params(params)
    monkeypatch.setattr(encoded_params, "SamplingParams", other_release(temperature=0.1, top_p=0.1))
    read = decode_params(data)
    for name in params.__struct_fields__:
        assert getattr(read, name) == getattr(params, name), name
    written_there = encode_params(read)
    monkeypatch.undo()
    assert decode_params(written_there) == params


def test_parameter_that_another_release_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that this release lacks is an error if it is set, and ignored otherwise."""
    set_, unset = encode_params(normalised(**GIVEN)), encode_params(normalised(temperature=0.5))
    monkeypatch.setattr(encoded_params, "SamplingParams", other_release(without="custom_params"))
    assert decode_params(unset).temperature == 0.5
    with pytest.raises(ValueError, match="the sampling parameter custom_params does not exist in the installed SGLang"):
        decode_params(set_)
    groups = [group("good", unset), group("bad", set_)]
    with pytest.raises(JournalError, match="group 'bad' cannot be continued: the sampling parameter"):
        _check_params(JournalSnapshot(groups=groups))
    _check_params(JournalSnapshot(groups=[groups[0]]))


@pytest.mark.parametrize("data", [b"", b"\xff", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"top_k": "x"})])
def test_bytes_that_are_no_parameters(data: bytes) -> None:
    with pytest.raises(ValueError, match="the sampling parameters cannot be read by the installed SGLang: "):
        decode_params(data)


def group(name: str, params: bytes) -> SnapshotGroup:
    return SnapshotGroup(0, "r", 0, request("round", name).prompts[0], params, [SnapshotSample(0)])
