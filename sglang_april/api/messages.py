"""What the HTTP process and the scheduler say to each other, as plain msgspec structs.

Commands go to the scheduler (rank 0 broadcasts them, so every rank decodes the same bytes); answers and events come
back. Their SGLang envelope, one `bytes` field, is in `sglang_april/adapter/v0_5_17/envelope.py`. Token ids travel as
little-endian int32 and logprobs as little-endian float32, because lists of Python numbers cost both event loops time.
"""

from typing import Any, Literal

import msgspec

from sglang_april.api.observations import Moved as Moved
from sglang_april.api.observations import Rates as Rates
from sglang_april.api.observations import Tuned as Tuned

Unit = Literal["group", "sample"]
KvPolicy = Literal["keep", "recompute", "auto"]
Provenance = Literal["fresh", "kept", "recomputed"]
Count = Literal["finished", "accepted"]
EndReason = Literal["quota", "stopped", "exhausted"]
Tier = Literal["auto", "device", "host", "disk", "none"]


class Prompt(msgspec.Struct, array_like=True):
    """One prompt of an accepted request; `n` samples of it form a group."""

    id: str
    input_ids: bytes
    """int32 [prompt_len]."""
    n: int
    params: int
    """Index into `OpenRound.params`."""
    seed: int
    """`sampling_seed` of the prompt, else of the round, else 0."""
    top_logprobs_num: int = 0
    priority: int | None = None
    metadata: bytes = b""
    """msgpack, opaque to the scheduler; empty when the caller gave none."""
    max_new_tokens: list[int] | None = None
    """One for each sample; None where `params` hold the same for all."""
    skip_special_tokens: bool = True
    """This and the rest are for the reply, and opaque to the scheduler too."""
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    truncates: bool = False
    """Whether top-k, top-p or min-p truncate the sampling distribution, which `logprobs` then do not describe."""


class OpenRound(msgspec.Struct, tag=True):
    """Step 1 to 2: a validated, tokenised rollout request."""

    seq: int
    round_id: str
    run: str
    prompts: list[Prompt]
    params: list[bytes]
    """Distinct sampling parameters, each a msgpack-encoded `SamplingParams`, normalised and verified."""
    quota: int | None
    unit: Unit
    kv: KvPolicy
    max_staleness: int | None
    surplus: Literal["carry", "return"] = "carry"
    concurrency: int | Literal["auto"] | None = None
    proximal: bool = False
    tier: Tier = "auto"
    keep_until_ack: bool = False
    count: Count = "finished"
    defaults: bytes = b""
    """msgpack of the request's `sampling_params`, for prompts that an `extend` adds; opaque to the scheduler."""
    fingerprint: str = ""
    """Of the request's body: tells the same request under this `round_id` from another one, after a restart too."""
    after_quota: Literal["suspend", "continue"] = "suspend"
    ahead: int = 1
    """Quotas of finished groups that may wait for the next round under `continue`."""
    quota_mode: Literal["first", "cohort"] = "first"
    cohort_rounds: int = 1


class StopRound(msgspec.Struct, tag=True):
    """End an open round now with what is finished, or with the groups named in `deliver`."""

    seq: int
    round_id: str
    deliver: list[str] | None = None


class JudgeRound(msgspec.Struct, tag=True):
    """`count: accepted`: the caller's verdict on finished groups, by prompt id."""

    seq: int
    round_id: str
    accept: list[str]
    reject: list[str]


class ExtendRound(msgspec.Struct, tag=True):
    """A greater quota and more prompts for an open round."""

    seq: int
    round_id: str
    quota_add: int
    prompts: list[Prompt]
    params: list[bytes]
    """As `OpenRound.params`; the prompts above index into this list."""


class Drop(msgspec.Struct, tag=True):
    """Delete undelivered groups of a run (all of them when `ids` is None): the only thing that deletes samples."""

    seq: int
    run: str
    ids: list[str] | None = None


class Acknowledge(msgspec.Struct, tag=True):
    """The caller has the reply of a round for good; of interest to the journal only."""

    seq: int
    round_id: str
    run: str


class PushBegin(msgspec.Struct, tag=True):
    seq: int
    version: int | None = None


class PushEnd(msgspec.Struct, tag=True):
    seq: int
    version: int | None = None


class Freeze(msgspec.Struct, tag=True):
    """A pause of any kind: nothing of ours takes a step until `Thaw`."""

    seq: int


class Thaw(msgspec.Struct, tag=True):
    seq: int


class GetState(msgspec.Struct, tag=True):
    seq: int
    check: bool = False
    """Verify every stored page on every rank; only the outcome is answered, when it is known."""


class GetPartials(msgspec.Struct, tag=True):
    seq: int
    run: str | None = None


Fact = Moved | Tuned | Rates
"""What only some rank can see, outside of a step; rank 0 broadcasts it, and nothing answers it."""

Command = (
    OpenRound
    | StopRound
    | JudgeRound
    | ExtendRound
    | Drop
    | Acknowledge
    | PushBegin
    | PushEnd
    | Freeze
    | Thaw
    | GetState
    | GetPartials
)

Lasting = OpenRound | StopRound | JudgeRound | ExtendRound | Drop | Acknowledge
"""Commands whose answer says that something is so for good: with a journal, they are answered once it is written."""


class Answer(msgspec.Struct, tag=True):
    """The answer to the command with the same `seq`. `status` is an HTTP status; if it is not 200, nothing changed."""

    seq: int
    status: int = 200
    field: str = ""
    reason: str = ""
    data: dict[str, Any] = {}


class Span(msgspec.Struct, array_like=True):
    """Output tokens [start, end) written under `version`; `kv` says how the KV beneath them came to be."""

    start: int
    end: int
    version: int
    kv: Provenance


class FinishedSample(msgspec.Struct, array_like=True):
    """A sample that has ended; sent once, in the step in which it ends."""

    run: str
    id: str
    incarnation: int
    index: int
    output_ids: bytes
    """int32 [output_len], the stop or EOS token included."""
    logprobs: bytes
    """float32 [output_len]; shorter only if the sample failed before it drew a token."""
    spans: list[Span]
    finish_reason: dict[str, Any]
    """SGLang's own form: `{"type": "stop", "matched": 1}`, `{"type": "length", "length": 16}`, …"""
    seed: int
    top_logprobs: list[list[tuple[float, int]]] | None = None
    """Per output token, `top_logprobs_num` pairs (logprob, token id)."""
    proximal_logprobs: list[float | None] | None = None
    proximal_version: int | None = None
    whole: bool = False
    """True on the sample that completes its group."""
    round_id: str | None = None
    """The open round in which it ended."""


class Finished(msgspec.Struct, tag=True):
    """Step 3: what finished in one step."""

    samples: list[FinishedSample]


class Delivery(msgspec.Struct, array_like=True):
    """A group (or, for `unit: sample`, the part of it named by `indices`) that a round's reply contains."""

    id: str
    incarnation: int
    indices: list[int]
    complete: bool
    accepted: bool | None = None
    """The caller's verdict on the group; None if it was not judged."""


class RoundEnded(msgspec.Struct, tag=True):
    """Step 6: the round is over; the reply is these groups, in this order."""

    round_id: str
    run: str
    policy_version: int
    end_reason: EndReason
    deliver: list[Delivery]
    carried: dict[str, Any]
    stats: dict[str, Any]
    carried_lengths: bytes = b""
    """int32: output tokens so far of each unfinished sample that has any."""


class Restored(msgspec.Struct, tag=True):
    """After a restart with a journal, before anything else: what the HTTP process has to know again."""

    groups: list[tuple[str, Prompt]]
    """(run, prompt) of every undelivered group."""
    verdicts: list[tuple[str, str, bool]]
    """(run, prompt id, accepted) of those that the caller has judged."""
    finished: list[FinishedSample]
    """In the order in which they ended."""
    rounds: list[OpenRound]
    """Rounds that are open again."""
    replies: list[tuple[OpenRound, RoundEnded, list[Prompt], list[FinishedSample]]]
    """Kept replies: what was asked, what was delivered, the prompts of its groups in order, its samples."""
    gone: list[str]
    """Ids of rounds whose replies are no longer kept."""
    unnamed: bool
    """Admission is closed until the policy version is named."""
    warnings: list[str]


class Named(msgspec.Struct, tag=True):
    """After a restart, the policy version has been named: rounds that are open again go on."""

    version: int


class JournalFault(msgspec.Struct, tag=True):
    """The journal cannot be written, and why; an empty reason: it can again."""

    reason: str


class Broken(msgspec.Struct, tag=True):
    """An exception of ours: no round is served any more, and those that are open have no reply."""

    reason: str


Event = Answer | Finished | RoundEnded | Restored | Named | JournalFault | Broken

_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(Command | Fact)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Fact | Event) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Command | Fact:
    """What a scheduler is told."""
    return _messages.decode(data)


def decode_event(data: bytes) -> Event:
    return _events.decode(data)
