"""Values of a tokenized request with which it alone would end SGLang's scheduler.

SGLang's routes check few types. The scheduler decodes each message by type and ends when it cannot, and it ends when a
number does not fit into a tensor, or when logits are no longer finite.
"""

from functools import cache
from typing import Any, get_args

import msgspec
from sglang.srt.managers.io_struct import PickleWrapper, msgpack_decode, msgpack_encode

MAX_BIAS = 1e30
"""Logits stay finite in float32."""
RANGES: dict[str, tuple[float, float]] = {
    "top_k": (-1, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "sampling_seed": (-(2**63), 2**63 - 1),
    "repetition_penalty": (1e-30, 2.0),
}
"""Of sampling parameters."""
PROCESSED = "mm_inputs"
"""Large, and SGLang's own: no value in it comes from the client as it is."""


def problem(request: Any, vocab: int) -> str:
    """Why the scheduler would end; empty if it would not."""
    kind: type[msgspec.Struct] = type(request)
    sent = msgspec.structs.replace(request, **_pickled(kind))
    try:
        msgpack_decode(msgpack_encode(sent))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        return _undecodable(sent) or str(error)
    params = request.sampling_params
    for name, (least, most) in RANGES.items():
        value = getattr(params, name)
        if value is not None and not least <= value <= most:
            return f"sampling_params.{name}: must be from {least} to {most}"
    if request.logprob_start_len < -1:
        return "logprob_start_len: must be a position in the prompt, or -1"
    if any(not 0 <= token < vocab for token in params.stop_token_ids or ()):
        return f"sampling_params.stop_token_ids: must be whole numbers from 0 to {vocab - 1}"
    if any(not abs(bias) <= MAX_BIAS for bias in (params.logit_bias or {}).values()):
        return f"sampling_params.logit_bias: must be from {-MAX_BIAS} to {MAX_BIAS}"
    return ""


@cache
def _pickled(message: type[msgspec.Struct]) -> dict[str, None]:
    """The fields that SGLang pickles before it sends the message, and processed images, all without a value."""
    fields = msgspec.structs.fields(message)
    return {f.name: None for f in fields if f.name == PROCESSED or PickleWrapper in get_args(f.type)}


def _undecodable(message: msgspec.Struct, place: str = "") -> str:
    """The first field that cannot be decoded, and why; empty if it is one of a type that SGLang encodes itself."""
    for field in msgspec.structs.fields(message):
        value, name = getattr(message, field.name), place + field.name
        if isinstance(value, msgspec.Struct) and (inner := _undecodable(value, f"{name}.")):
            return inner
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=field.type)
        except TypeError:
            continue
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            return f"{name}: {error}"
    return ""
