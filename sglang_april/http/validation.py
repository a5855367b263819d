"""Checks of a rollout request that span several fields (`refusal-changes-nothing`)."""

import hashlib
import math
import uuid
from typing import Any

import msgspec
import numpy as np

from sglang_april.api.errors import bad
from sglang_april.api.requests import Body, EndBody, JudgeBody, PromptBody, RolloutBody, SamplingBody

MAX_SAMPLES = 2**20
MAX_DEPTH = 64
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_rollout(body: RolloutBody, packed: bool) -> str:
    """Check a request, convert its `input_ids` to bytes, and return the request's fingerprint.

    The fingerprint distinguishes a repeated request from a different one with the same `round_id`. The
    encoding of the reply (`stream`, `previews`, JSON or msgpack) is not part of it.

    Raises:
        RequestError: 400 with the field.
    """
    if body.round_id is None:  # part of the fingerprint, so that the request can be repeated with the id it was given
        body.round_id = uuid.uuid4().hex
    if body.round_id in (".", ".."):
        raise bad("round_id", "must not be . or .., which cannot be used in a URL")
    if body.sampling_params is not None:
        _check_sampling(body.sampling_params, "sampling_params")
    check_prompts(body.prompts, packed)
    _check_trajectories(body)
    return fingerprint(msgspec.structs.replace(body, stream=False, previews=False))


def _check_trajectories(body: RolloutBody) -> None:
    """Refuse fields that a round of trajectories does not support, and its own fields in other rounds."""
    grouped = body.trajectories and body.quota_unit == "group"
    if body.trajectories and body.quota_unit not in ("group", "trajectory"):
        raise bad("quota_unit", "must be group or trajectory in a round of trajectories")
    if (body.n is not None) != grouped:
        raise bad("n", "is needed with quota_unit group and trajectories true, and belongs to the prompt otherwise")
    if not (body.trajectories or body.quota_unit == "trajectory"):
        if body.wait_s is not None:
            raise bad("wait_s", "applies only to a round of trajectories")
        return
    for name in ("prompts", "sampling_params", "proximal", "stream"):
        if getattr(body, name):
            raise bad(name, "is not supported in a round of trajectories")
    for name, value in (("count", "finished"), ("quota_mode", "first")):
        if getattr(body, name) != value:
            raise bad(name, f"must be {value} in a round of trajectories")


def check_end(body: EndBody) -> None:
    """Refuse a trajectory that is both done and rejected, and metadata that is not plain.

    Raises:
        RequestError: 400 with the field.
    """
    for i, name in enumerate(body.reject):
        if name in body.trajectories:
            raise bad(f"reject[{i}]", f"{name!r} is also in trajectories")
    for name, ended in body.trajectories.items():
        if ended.metadata is not None:
            _check_plain(ended.metadata, f"trajectories.{name}.metadata")


def check_prompts(prompts: list[PromptBody], packed: bool) -> None:
    """Check the prompts of one request, and convert their `input_ids` to bytes (int32).

    Raises:
        RequestError: 400 with the field.
    """
    first_seen: dict[str, int] = {}
    samples = 0
    for i, prompt in enumerate(prompts):
        if prompt.id in first_seen:
            raise bad(f"prompts[{i}].id", f"is the same as prompts[{first_seen[prompt.id]}].id")
        first_seen[prompt.id] = i
        samples += prompt.n
        _check_prompt(prompt, f"prompts[{i}]", packed)
    if samples > MAX_SAMPLES:
        raise bad("prompts", f"ask for {samples} samples, and one request may ask for at most {MAX_SAMPLES}")


def check_judge(body: JudgeBody) -> None:
    """Refuse a message that both accepts and rejects a group.

    Raises:
        RequestError: 400 with the field.
    """
    accepted = set(body.accept)
    for i, name in enumerate(body.reject):
        if name in accepted:
            raise bad(f"reject[{i}]", f"{name!r} is also in accept")


def fingerprint(body: Body) -> str:
    """A digest of a checked request body; JSON and msgpack of the same content have the same one."""
    return hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=16).hexdigest()


def _check_prompt(prompt: PromptBody, at: str, packed: bool) -> None:
    given = [name for name in ("input_ids", "text", "messages") if getattr(prompt, name) is not None]
    if len(given) != 1:
        field = f"{at}.{given[-1] if given else 'input_ids'}"
        raise bad(field, f"exactly one of input_ids, text and messages is needed, not {' and '.join(given) or 'none'}")
    if prompt.input_ids is not None:
        prompt.input_ids = _raw_ids(prompt.input_ids, f"{at}.input_ids", packed)
    if prompt.text == "":
        raise bad(f"{at}.text", "is empty")
    if prompt.messages is not None:
        _check_messages(prompt.messages, f"{at}.messages")
    if prompt.sampling_params is not None:
        _check_sampling(prompt.sampling_params, f"{at}.sampling_params", prompt.n)
    if prompt.metadata is not None:
        _check_plain(prompt.metadata, f"{at}.metadata")


def _raw_ids(ids: list[int] | bytes, field: str, packed: bool) -> bytes:
    """Token ids as little-endian int32."""
    if isinstance(ids, list):
        raw = np.asarray(ids, dtype="<i4").tobytes()
    elif not packed:
        raise bad(field, "Expected array, got str")
    elif len(ids) % 4:
        raise bad(field, f"must be little-endian int32 numbers; {len(ids)} bytes are not")
    else:
        raw = ids
    if not raw:
        raise bad(field, "is empty")
    return raw


def _check_messages(messages: list[dict[str, Any]], field: str) -> None:
    if not messages:
        raise bad(field, "is empty")
    for i, message in enumerate(messages):
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise bad(f"{field}[{i}].{name}", "must be a string")
        _check_plain(message, f"{field}[{i}]")


def _check_sampling(params: SamplingBody, at: str, n: int | None = None) -> None:
    """`n`: samples of the prompt that the parameters belong to; None for the round's parameters."""
    _check_lengths(params, f"{at}.max_new_tokens", n)
    if params.top_k == 0:
        raise bad(f"{at}.top_k", "must be -1 (off) or at least 1")
    grammars = [name for name in GRAMMARS if getattr(params, name)]
    if len(grammars) > 1:
        raise bad(f"{at}.{grammars[1]}", f"only one grammar may be set, and {grammars[0]} is")
    for token in params.logit_bias or {}:
        if not token.isascii() or not token.isdecimal() or len(token) > 10:
            raise bad(f"{at}.logit_bias", f"keys must be token ids, not {token!r}")


def _check_lengths(params: SamplingBody, field: str, n: int | None) -> None:
    lengths = params.max_new_tokens
    if not isinstance(lengths, list):
        return
    if n is None:
        raise bad(field, "may be a list only in the sampling_params of a prompt, with one number per sample")
    if len(lengths) != n:
        raise bad(field, f"has {len(lengths)} numbers for {n} samples")


def _check_plain(value: Any, field: str, depth: int = 0) -> None:
    """Metadata is returned as JSON or msgpack, so only values that both can represent are accepted."""
    if depth > MAX_DEPTH:
        raise bad(field, f"is nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, (str, bool)):
        return
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise bad(field, "contains a number beyond 64 bits")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise bad(field, "must not contain NaN or Infinity")
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, field, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise bad(field, "must have only strings as keys")
            _check_plain(item, field, depth + 1)
    else:
        raise bad(field, f"must be plain JSON, and {type(value).__name__} is not")
