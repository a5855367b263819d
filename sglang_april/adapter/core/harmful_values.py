"""Values of a tokenized request with which it alone would end SGLang's scheduler.

SGLang's routes check few types. The scheduler decodes each message by type and ends when it cannot, and it ends when a
number does not fit into a tensor, or when logits are no longer finite.
"""

import functools
from typing import Any

import msgspec

CLIENT_FIELDS = frozenset(
    {
        "rid",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "token_ids_logprob",
        "stream",
        "return_hidden_states",
        "custom_logit_processor",
        "routing_key",
        "require_reasoning",
        "priority",
        "extra_key",
        "no_logs",
    }
)
"""Fields of a request that its client sets, beside its prompt and its sampling parameters."""
MAX_BIAS = 1e30
"""Logits stay finite in float32."""
RANGES: dict[str, tuple[float, float]] = {
    "top_k": (-1, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "sampling_seed": (-(2**63), 2**63 - 1),
    "repetition_penalty": (1e-30, 2.0),
}
"""Of sampling parameters."""


def problem(request: Any, vocab: int) -> str:
    """Why the scheduler would end; empty if it would not."""
    params = request.sampling_params
    wrong = _undecodable(request, "") or _undecodable(params, "sampling_params.")
    if wrong:
        return wrong
    for name, (least, most) in RANGES.items():
        value = getattr(params, name)
        if value is not None and not least <= value <= most:
            return f"sampling_params.{name}: must be from {least} to {most}"
    if request.logprob_start_len < -1:
        return "logprob_start_len: must be a position in the prompt, or -1"
    if any(not 0 <= token < vocab for token in request.token_ids_logprob or ()):
        return f"token_ids_logprob: must be whole numbers from 0 to {vocab - 1}"
    if any(not 0 <= token < vocab for token in params.stop_token_ids or ()):
        return f"sampling_params.stop_token_ids: must be whole numbers from 0 to {vocab - 1}"
    if any(not abs(bias) <= MAX_BIAS for bias in (params.logit_bias or {}).values()):
        return f"sampling_params.logit_bias: must be from {-MAX_BIAS} to {MAX_BIAS}"
    return ""


def _undecodable(message: Any, place: str) -> str:
    kind: type[msgspec.Struct] = type(message)
    for name, decoder in _decoders(kind).items():
        try:
            decoder.decode(msgspec.msgpack.encode(getattr(message, name)))
        except (msgspec.ValidationError, OverflowError) as error:
            return f"{place}{name}: {error}"
    return ""


@functools.cache
def _decoders(message: type[msgspec.Struct]) -> dict[str, "msgspec.msgpack.Decoder[Any]"]:
    fields = msgspec.structs.fields(message)
    is_request = any(field.name == "sampling_params" for field in fields)
    checked = [field for field in fields if field.name in CLIENT_FIELDS or not is_request]
    return {field.name: msgspec.msgpack.Decoder(field.type) for field in checked}
