"""The bodies of all routes, decoded from JSON or msgpack into checked structs.

Types, ranges and names are checked here. `http/validation.py` checks what depends on several fields, and
`http/prepare.py` what depends on the model. Every error is a `RequestError` that names the field (`prompts[3].n`).
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sglang_april.api.errors import RequestError, bad

MAX_COUNT = 2**31 - 1
MAX_VERSION = 2**62

Name = Annotated[str, Meta(min_length=1, max_length=256)]
RunName = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[^\0]")]
"""NUL begins the names of the runs of attached requests (`scheduler/attached.py`)."""
RoundId = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[A-Za-z0-9._-]+\Z")]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Version = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
Text = Annotated[str, Meta(min_length=1)]


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies: fields by name only, unknown ones are errors."""


class SamplingBody(Body):
    """SGLang's sampling parameters. Null means SGLang's default; an absent field means the round's value."""

    max_new_tokens: Count | list[Count] | UnsetType | None = UNSET
    """On a prompt also a list of `n` limits, one per sample."""
    min_new_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | UnsetType | None = UNSET
    stop: Text | list[Text] | UnsetType | None = UNSET
    stop_token_ids: list[TokenId] | UnsetType | None = UNSET
    stop_regex: Text | list[Text] | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | UnsetType | None = UNSET
    min_p: Fraction | UnsetType | None = UNSET
    frequency_penalty: Penalty | UnsetType | None = UNSET
    presence_penalty: Penalty | UnsetType | None = UNSET
    repetition_penalty: Annotated[float, Meta(ge=1e-30, le=2)] | UnsetType | None = UNSET
    json_schema: str | UnsetType | None = UNSET
    regex: str | UnsetType | None = UNSET
    ebnf: str | UnsetType | None = UNSET
    structural_tag: str | UnsetType | None = UNSET
    ignore_eos: bool | UnsetType | None = UNSET
    skip_special_tokens: bool | UnsetType | None = UNSET
    spaces_between_special_tokens: bool | UnsetType | None = UNSET
    no_stop_trim: bool | UnsetType | None = UNSET
    logit_bias: dict[str, Annotated[float, Meta(ge=-1e6, le=1e6)]] | UnsetType | None = UNSET
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | UnsetType | None = UNSET

    def given(self) -> dict[str, Any]:
        """The parameters in the request, nulls included."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}


class PromptBody(Body):
    """One prompt; exactly one of `input_ids`, `text` and `messages` is given."""

    id: Name
    input_ids: list[TokenId] | bytes | None = None
    """A list, or in msgpack also raw little-endian int32; `check_rollout` converts a list to such bytes."""
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    n: Annotated[int, Meta(ge=1, le=2**14)] = 1
    sampling_params: SamplingBody | None = None
    metadata: Any = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=1024)] = 0
    priority: Annotated[int, Meta(ge=-(2**31), le=MAX_COUNT)] | None = None


class RolloutBody(Body):
    """Body of `POST /april/rollout` (docs/api.md). UNSET fields take the launch flag's value."""

    run: RunName = "default"
    round_id: RoundId | None = None
    prompts: list[PromptBody] = []
    sampling_params: SamplingBody | None = None
    quota: Count | UnsetType | None = UNSET
    quota_unit: Literal["group", "sample", "trajectory"] | UnsetType = UNSET
    trajectories: bool = False
    n: Annotated[int, Meta(ge=1, le=2**14)] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    count: Literal["finished", "accepted"] = "finished"
    kv: Literal["keep", "recompute", "auto"] | UnsetType = UNSET
    max_staleness: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | UnsetType | None = UNSET
    surplus: Literal["carry", "return"] = "carry"
    after_quota: Literal["suspend", "continue"] = "suspend"
    ahead: Count = 1
    quota_mode: Literal["first", "cohort"] = "first"
    cohort_rounds: Count = 1
    proximal: bool = False
    concurrency: Count | Literal["auto"] | None = None
    keep_until_ack: bool = False
    tier: Literal["auto", "device", "host", "disk", "none"] = "auto"
    stream: bool = False
    previews: bool = False
    """In a stream, also groups as they finish, before the round delivers or carries them; on with `count: accepted`."""


class StopBody(Body):
    """`POST /april/rounds/{id}/stop`."""

    deliver: list[Name] | None = None


class JudgeBody(Body):
    """`POST /april/rounds/{id}/judge`: verdicts on finished groups, by prompt id."""

    accept: list[Name] = []
    reject: list[Name] = []


class ExtendBody(Body):
    """`POST /april/rounds/{id}/extend`: a larger quota and more prompts for an open round."""

    quota_add: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    prompts: list[PromptBody] = []
    idempotency_key: Name | None = None
    """The same key and body again in this round change nothing and get the first answer."""


class DoneBody(Body):
    """The caller's reward and metadata for a trajectory that is done."""

    reward: Annotated[float, Meta(ge=-1e308, le=1e308)] | None = None
    metadata: Any = None


class EndBody(Body):
    """`POST /april/rounds/{id}/done`: trajectories that are done, and those that are rejected."""

    trajectories: dict[Name, DoneBody] = {}
    reject: list[Name] = []


class EndOfRunBody(EndBody):
    """`POST /april/trajectories/done`."""

    run: RunName = "default"


class DropBody(Body):
    """`POST /april/drop`: named groups of a run, or all of them. `run` has no default here: this deletes."""

    run: RunName
    ids: list[Name] | None = None


class PushBody(Body):
    """`POST /april/push/begin` and `/end`."""

    version: Version | None = None


class EmptyBody(Body):
    """A body without fields."""


REFUSED_FIELDS = {
    "n": "belongs to the prompt, not to the sampling parameters",
    "stream_interval": "does not apply: a round streams whole groups",
    "custom_params": "is not supported, because custom logit processors are not",
    "custom_logit_processor": "is not supported",
    "lora_path": "is not supported in this version",
    "return_routed_experts": "is not supported in this version",
    "return_hidden_states": "is not supported",
    "return_sampling_mask": "is not supported in this version",
    "sampling_logprobs": "is not supported in this version",
    "input_embeds": "is not supported: give input_ids, text or messages",
    "image_data": "is not supported: prompts are text only",
    "video_data": "is not supported: prompts are text only",
    "audio_data": "is not supported: prompts are text only",
    "modalities": "is not supported: prompts are text only",
    "return_logprob": "is not needed: logprobs are always returned",
    "rid": "is not a field of a prompt: its name is id",
}

T = TypeVar("T", bound=Body)


def decoder(kind: type[T]) -> Callable[[bytes, bool], T]:
    """A function from (body, whether it is msgpack) to a `kind`; an empty body counts as an empty object.

    The function raises RequestError: 400 with the field.
    """
    as_json, as_msgpack = msgspec.json.Decoder(kind), msgspec.msgpack.Decoder(kind)

    def decode(data: bytes, packed: bool) -> T:
        if not data:
            data = b"\x80" if packed else b"{}"
        try:
            return (as_msgpack if packed else as_json).decode(data)
        except msgspec.ValidationError as error:
            raise _named(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad("body", f"is not valid {'msgpack' if packed else 'JSON'}: {error}") from None
        except RecursionError:
            raise bad("body", "is nested too deeply") from None

    return decode


def _named(message: str) -> RequestError:
    """Split msgspec's `reason - at `$.path`` into a field and a reason."""
    reason, _, place = message.rpartition(" - at ")
    if not reason:
        reason, place = message, ""
    path = re.search(r"`\$\.?([^`]*)`$", place)
    field = path.group(1) if path else ""
    unknown = re.match(r"Object (?:contains unknown|missing required) field `(.*)`$", reason, re.DOTALL)
    if unknown:
        name = unknown.group(1) or '""'
        field = f"{field}.{name}" if field else name
        if "missing" in reason[:15]:
            return bad(field, "is required")
        return bad(field, REFUSED_FIELDS.get(name, "is not a known field"))
    if "matching regex" in reason:
        reason = "may have only the characters A-Z a-z 0-9 . _ -"
    return bad(field or "body", reason.replace("`", ""))


decode_rollout = decoder(RolloutBody)
decode_stop = decoder(StopBody)
decode_judge = decoder(JudgeBody)
decode_extend = decoder(ExtendBody)
decode_drop = decoder(DropBody)
decode_end = decoder(EndBody)
decode_end_of_run = decoder(EndOfRunBody)
decode_push = decoder(PushBody)
decode_nothing = decoder(EmptyBody)


def check_round_id(round_id: str) -> str:
    """Check the id of a round in a URL.

    Raises:
        RequestError: 400.
    """
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,256}", round_id):
        raise bad("round_id", "must be 1 to 256 of the characters A-Z a-z 0-9 . _ -")
    return round_id
