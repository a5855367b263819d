"""Which requests of SGLang's own routes belong to a run, and which fields their answers get (`attached-request`).

A request names its run, its trajectory and the trajectory's group in the headers `RUN`, `TRAJECTORY` and `GROUP`, in
headers that SGLang's router forwards (`forwarded`), or under the same keys in `sampling_params.custom_params`;
`--april-attach RUN` attaches the requests that name none. In the same ways it can name a seed of the run, `SEED`.
"""

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_april.api.types import GROUP, RUN, TRAJECTORY, forwarded
from sglang_april.http.prepare import PENALTIES, PENALTIES_LAG
from sglang_april.scheduler.state import sample_seed

NAMES = RUN, TRAJECTORY, GROUP
SEED = "x-april-seed"
"""A whole number: requests without a `sampling_seed` get the one that `seed_of` derives from it."""
KEYS = (*NAMES, SEED)
FORWARDED = {key: forwarded(key) for key in KEYS}
HEADERS = frozenset((*KEYS, *FORWARDED.values()))
MAX_NAME = 256
DESCRIPTION = "april"
"""Field of a finish reason on its way to the HTTP process: an `EndedRequest` as JSON."""

SUPPORTED = frozenset(
    {
        "rid",
        "text",
        "input_ids",
        "sampling_params",
        "return_logprob",
        "logprob_start_len",
        "top_logprobs_num",
        "return_text_in_logprobs",
        "stream",
        "log_metrics",
        "routing_key",
        "conversation_id",
        "http_worker_ipc",
        "background",
        "priority",
        "extra_key",
        "no_logs",
        "custom_labels",
        "return_prompt_token_ids",
        "external_trace_header",
        "received_time",
        "require_reasoning",
    }
)
"""Fields of SGLang's request that an attached one may set: their effect survives a suspend. All others depend on
state that SGLang keeps by request slot, or on its own prefill."""

_UNSUPPORTED = {
    f.name: f.default if f.default is not dataclasses.MISSING else None
    for f in dataclasses.fields(GenerateReqInput)
    if f.name not in SUPPORTED
}
"""All other fields, and the values that an attached request may have there."""


class Attachment(NamedTuple):
    """The run of a request, and in that run its trajectory and the trajectory's group, if it names them."""

    run: str
    trajectory: str | None
    group: str | None = None


def attachment_of(custom_params: Any) -> Attachment | None:
    """The attachment that a request's parameters name; None if it is not attached."""
    if not isinstance(custom_params, dict) or RUN not in custom_params:
        return None
    return Attachment(custom_params[RUN], custom_params.get(TRAJECTORY), custom_params.get(GROUP))


class AuditRequest(GenerateReqInput):
    """A request of the plugin's own audit, which belongs to no run."""


def attach(
    obj: Any,
    headers: Mapping[str, str],
    default: str | None,
    *,
    overlap: bool = False,
    preferred: Mapping[str, Any] | None = None,
) -> Attachment | None:
    """Decide whether a request is attached, and write that into its parameters, which reach the scheduler.

    Args:
        default: the run of `--april-attach`.
        overlap: whether the scheduler runs its overlap loop.
        preferred: `--preferred-sampling-params`, which SGLang adds later to what the request sets itself.

    Raises:
        ValueError: the request is to be attached, but names no run, or sets a field whose effect would not survive a
            suspend.
    """
    if not isinstance(obj, GenerateReqInput) or isinstance(obj, AuditRequest):
        return None
    preferred = preferred or {}
    each = _merged(obj, preferred)
    named, custom = _headers(headers), [_custom(params) for params in each]
    if default is None and not named and not any(custom):
        return None  # names nothing, as most requests of a server without `--april-attach`
    run, trajectory, group, seed = (named.get(key) or _common(custom, key) for key in KEYS)
    is_part = trajectory is not None or group is not None
    if run is None and default is None:
        if is_part:
            raise ValueError(f"{GROUP if trajectory is None else TRAJECTORY}: needs {RUN}")
        _mark(obj, [None] * len(KEYS), preferred)  # the scheduler trusts what it reads there
        return None
    problem = _problem(obj) or _beams(each) or (_penalty(each) if overlap else "")
    problem = problem or (_leg_problem(obj, each) if trajectory is not None else "")
    if run is None and not is_part and (problem or str(obj.rid).startswith(HEALTH_CHECK_RID_PREFIX)):
        _mark(obj, [None] * len(KEYS), preferred)
        return None
    if not all(isinstance(params, dict) for params in each):
        problem = "sampling_params: must be an object, or one per request of a batch"
    if problem:
        raise ValueError(problem)
    if group is not None and trajectory is None:
        raise ValueError(f"{GROUP}: needs {TRAJECTORY}")
    for key, value in zip(NAMES, (run, trajectory, group), strict=True):
        if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME and "\0" not in value):
            raise ValueError(f"{key}: must be a string of 1 to {MAX_NAME} characters")
    attachment = Attachment(run or default or "", trajectory, group)
    _mark(obj, (*attachment, _seed(seed, each)), preferred)
    return attachment


def seed_of(custom_params: Any, name: str, input_ids: bytes) -> int | None:
    """The seed of a request that has no `sampling_seed`, if its run asks for seeds, so that it draws the same again.

    Args:
        name: its trajectory, else its `rid`.
        input_ids: its prompt, which distinguishes the legs of a trajectory.
    """
    seed = custom_params.get(SEED) if isinstance(custom_params, dict) else None
    return None if seed is None else sample_seed(seed, name, zlib.crc32(input_ids), 0)


def _seed(given: Any, each: list[Any]) -> int | None:
    if given is None:
        return None
    if not str(given).isdecimal() or int(given) >= 2**63:
        raise ValueError(f"{SEED}: must be a whole number from 0 to 2^63 - 1")
    if any((params.get("n") or 1) > 1 for params in each):
        raise ValueError(f"{SEED}: needs n: 1, because SGLang draws the rids of several choices")
    return int(given)


def is_attached(obj: Any) -> bool:
    """Whether `attach` has attached the request."""
    params = getattr(obj, "sampling_params", None)
    params = params[0] if isinstance(params, list) and params else params
    return isinstance(params, dict) and attachment_of(params.get("custom_params")) is not None


def _merged(obj: GenerateReqInput, preferred: Mapping[str, Any]) -> list[Any]:
    """The parameters of each request of `obj` as SGLang will merge them."""
    given = obj.sampling_params or {}
    each = given if isinstance(given, list) else [given]
    return [{**preferred, **one} if isinstance(one, dict) else one for one in each] if preferred else each


def _custom(params: Any) -> dict[str, Any]:
    custom = params.get("custom_params") if isinstance(params, dict) else None
    return custom if isinstance(custom, dict) else {}


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers among `KEYS`, read once: a look-up reads all of a request's headers. Most requests have none."""
    if HEADERS.isdisjoint(headers):
        return {}
    found: dict[str, str] = {}
    for name, value in headers.items():
        if name in HEADERS and value:
            found.setdefault(name, value)
    return {key: header for key in KEYS if (header := found.get(key) or found.get(FORWARDED[key]))}


def _common(custom: list[dict[str, Any]], key: str) -> Any:
    """What the parameters of a request, or of every request of a batch, name under a key."""
    names = [params.get(key) for params in custom]
    if any(name != names[0] for name in names):
        raise ValueError(f"{key}: must be the same in all requests of a batch")
    return names[0] if names else None


def without_keys(custom_params: Any) -> dict[str, Any] | None:
    """What a request's `custom_params` contain besides `KEYS`; None if nothing."""
    return {key: value for key, value in (custom_params or {}).items() if key not in KEYS} or None


def _mark(obj: GenerateReqInput, values: Sequence[str | int | None], preferred: Mapping[str, Any]) -> None:
    """Write the values of `KEYS` into a request's parameters, or take them out where they are None."""
    given = obj.sampling_params or {}
    each = [_marked(one, values, preferred) for one in (given if isinstance(given, list) else [given])]
    obj.sampling_params = each if isinstance(given, list) else each[0]


def _marked(params: Any, values: Sequence[str | int | None], preferred: Mapping[str, Any]) -> Any:
    now = _custom({**preferred, **params} if isinstance(params, dict) else params)
    custom = without_keys(now) or {}
    custom |= {key: value for key, value in zip(KEYS, values, strict=True) if value is not None}
    return params if custom == now else {**params, "custom_params": custom or None}


def _leg_problem(obj: GenerateReqInput, each: list[Any]) -> str:
    """Why a request cannot be a leg: a leg has one sample, so that the next leg can continue it. Empty if it can."""
    batch = isinstance(obj.text, list) or bool(obj.input_ids and isinstance(obj.input_ids[0], list))
    if batch or any(isinstance(params, dict) and (params.get("n") or 1) > 1 for params in each):
        return f"{TRAJECTORY}: names one request with one sample, not several"
    return ""


def _problem(obj: GenerateReqInput) -> str:
    fields = vars(obj)
    for name, default in _UNSUPPORTED.items():
        if (value := fields[name]) and value != default:
            return f"{name}: is not supported in a request that belongs to a run ({RUN})"
    return ""


def _beams(each: list[Any]) -> str:
    """SGLang 0.5.23: a suspend stores the KV of one row, and a beam search has one per beam."""
    if any(isinstance(one, dict) and one.get("beam_width") not in (None, 1) for one in each):
        return f"beam_width: is not supported in a request that belongs to a run ({RUN})"
    return ""


def _penalty(each: list[Any]) -> str:
    for one in each:
        for name, neutral in PENALTIES.items():
            if isinstance(one, dict) and one.get(name) not in (None, neutral):
                return f"{name}: {PENALTIES_LAG}"
    return ""
