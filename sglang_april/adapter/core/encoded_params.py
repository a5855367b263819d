"""Sampling parameters as bytes that every supported SGLang release can read: messages and the journal hold them.

SGLang's own encoding is by position in some releases and by name in others, and positions differ.
"""

from functools import cache
from typing import Any

import msgspec
from sglang.srt.sampling.sampling_params import SamplingParams


def encode_params(params: SamplingParams) -> bytes:
    """All fields of normalised parameters by name, as msgpack: defaults differ between releases."""
    return msgspec.msgpack.encode(msgspec.structs.asdict(params))


def decode_params(data: bytes) -> SamplingParams:
    """Parameters that this or another release has encoded.

    Raises:
        ValueError: a parameter is set that the installed release does not have, or a value is not of its type.
    """
    types = _types(SamplingParams)
    try:
        values: dict[str, Any] = msgspec.msgpack.decode(data, type=dict)
        unknown = [name for name, value in values.items() if name not in types and value]
        if unknown:
            raise ValueError(f"the sampling parameter {unknown[0]} does not exist in the installed SGLang")
        known = {name: msgspec.convert(value, types[name]) for name, value in values.items() if name in types}
    except msgspec.MsgspecError as error:
        raise ValueError(f"the sampling parameters cannot be read by the installed SGLang: {error}") from error
    return SamplingParams(**known)


@cache
def _types(params: type) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(params)}
