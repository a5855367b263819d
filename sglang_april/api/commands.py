"""Commands from the HTTP process to the scheduler. Rank 0 broadcasts them: every rank decodes the same bytes."""

import msgspec

from sglang_april.api.types import Prompt, RoundSpec


class OpenRound(msgspec.Struct, tag=True):
    """A validated and tokenised rollout request."""

    seq: int
    spec: RoundSpec
    prompts: list[Prompt]
    params: list[bytes]
    """Distinct sampling parameters, each a `SamplingParams`, normalised and verified, by name as msgpack."""


class StopRound(msgspec.Struct, tag=True):
    """End an open round now with what has finished, or with the groups named in `deliver`."""

    seq: int
    round_id: str
    deliver: list[str] | None = None
    waited: bool = False
    """The round of trajectories has waited for `wait_s`: it ends only if its quota is met."""


class JudgeRound(msgspec.Struct, tag=True):
    """`count: accepted`: the caller's verdicts on finished groups, by prompt id."""

    seq: int
    round_id: str
    accept: list[str]
    reject: list[str]


class ExtendRound(msgspec.Struct, tag=True):
    """A larger quota and more prompts for an open round."""

    seq: int
    round_id: str
    quota_add: int
    prompts: list[Prompt]
    params: list[bytes]
    """As `OpenRound.params`; the prompts above index into this list."""
    idempotency_key: str | None = None
    fingerprint: str = ""
    """Digest of the request body."""


class EndTrajectories(msgspec.Struct, tag=True):
    """Trajectories of a run are done, or rejected."""

    seq: int
    run: str
    done: dict[str, bytes]
    """By trajectory, the caller's reward and metadata as msgpack, opaque to the scheduler."""
    reject: list[str]


class GetTrajectory(msgspec.Struct, tag=True):
    """`GET /april/trajectories/{id}`: the scheduler's part."""

    seq: int
    run: str
    id: str


class Drop(msgspec.Struct, tag=True):
    """Delete undelivered groups of a run, all of them if `ids` is None (`only-drop-deletes`)."""

    seq: int
    run: str
    ids: list[str] | None = None
    round_id: str = ""
    """The open round whose acceptance could not be journalled; it ends without a reply."""


class Acknowledge(msgspec.Struct, tag=True):
    """The caller has stored the reply of a round. Only the journal uses it."""

    seq: int
    round_id: str


class DeleteReply(msgspec.Struct, tag=True):
    """The HTTP process no longer keeps the reply of a round (`kept-replies`). Only the journal uses it."""

    seq: int
    round_id: str


class PushBegin(msgspec.Struct, tag=True):
    """A weight push begins; every sample is suspended."""

    seq: int
    version: int | None = None


class PushEnd(msgspec.Struct, tag=True):
    """A weight push is complete; the policy version moves."""

    seq: int
    version: int | None = None


class Freeze(msgspec.Struct, tag=True):
    """A pause of any kind: no sample takes a step until `Thaw`."""

    seq: int


class Thaw(msgspec.Struct, tag=True):
    """The pause is over."""

    seq: int


class Shutdown(msgspec.Struct, tag=True):
    """The server ends: every sample is suspended, and no further round is opened."""

    seq: int
    store: bool
    """Move KV on the device and the host to the disk, where a restart with the journal finds it."""


class GetState(msgspec.Struct, tag=True):
    """`GET /april/state`."""

    seq: int
    check: bool = False
    """Verify every stored page on every rank. The answer contains only the outcome, and is sent once that is known."""
    brief: bool = False
    """Only the policy version, `closed`, how many samples run, and the tags of released memory."""


class GetPartials(msgspec.Struct, tag=True):
    """`GET /april/partials`."""

    seq: int
    run: str | None = None


Command = (
    OpenRound
    | StopRound
    | JudgeRound
    | ExtendRound
    | Drop
    | EndTrajectories
    | GetTrajectory
    | Acknowledge
    | DeleteReply
    | PushBegin
    | PushEnd
    | Freeze
    | Thaw
    | Shutdown
    | GetState
    | GetPartials
)

Lasting = OpenRound | StopRound | JudgeRound | ExtendRound | EndTrajectories | Drop | Acknowledge | Shutdown | PushEnd
"""Commands with a durable effect: with a journal they are answered once it is written (`journal-before-reply`)."""
