"""Answers and events from the scheduler to the HTTP process."""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from sglang_april.api.types import Delivery, EndReason, FinishedSample, Prompt, RoundSpec, Span


class Answer(msgspec.Struct, tag=True):
    """The answer to the command with the same `seq`. `status` is an HTTP status; if it is not 200, nothing changed,
    except that a 500 with the field `journal` follows a change that cannot be journalled."""

    seq: int
    status: int = 200
    field: str = ""
    reason: str = ""
    data: dict[str, Any] = {}


def count_verdicts(verdicts: Iterable[bool]) -> dict[str, int]:
    """The counts in the answer to a `judge`."""
    taken = list(verdicts)
    return {"accepted": taken.count(True), "rejected": taken.count(False)}


class Finished(msgspec.Struct, tag=True):
    """The samples that finished in one step."""

    samples: list[FinishedSample]


class RoundEnded(msgspec.Struct, tag=True):
    """A round has ended; its reply contains these groups, in this order."""

    round_id: str
    run: str
    policy_version: int
    end_reason: EndReason
    deliver: list[Delivery]
    carried: dict[str, Any]
    stats: dict[str, Any]
    carried_lengths: bytes = b""
    """int32: output tokens so far of each unfinished sample that has any."""
    trajectories: list[str] = []
    """In place of `deliver`, the trajectories that the reply contains, in this order."""
    rejected: list[str] = []
    """Trajectories that have been rejected since the run's last reply."""
    verdicts: dict[str, bool] = {}
    """With `count: accepted`, the verdicts on the round's groups by prompt id, delivered or carried."""
    error: str = ""
    """Why the reply cannot be journalled: the round fails. After a restart it is open, and delivers again."""


class LegEnded(msgspec.Struct, tag=True):
    """A leg of a trajectory has ended, finished or aborted."""

    run: str
    trajectory: str
    group: str
    number: int
    rid: str
    parent: int | None
    shared: int
    """How many tokens of the parent's sequence its prompt begins with."""
    prompt_ids: bytes
    """int32: the prompt behind those tokens."""
    prefilled: int
    """Prompt tokens that were computed; the others had KV already."""
    result: FinishedSample
    mismatch: bool = False
    """It continues no sequence, although one had ended when it arrived."""
    policy_version: int = -1
    """Policy version when it ended; an earlier journal has none."""


class SavedTrajectory(msgspec.Struct, array_like=True):
    """A trajectory as the journal stores it."""

    run: str
    id: str
    group: str
    state: Literal["active", "done", "rejected", "left"]
    """`rejected` ones are to be named in the next reply; `left`: delivered, dropped, or named in one."""
    oldest: int | None = None
    """Policy version of its first output token; None without tokens."""
    outcome: Literal["", "done", "rejected"] = ""
    end_number: int = -1
    """Its place among the trajectories of the run that have ended."""
    result: bytes = b""
    """The caller's reward and metadata as msgpack, opaque to the scheduler; empty unless done."""
    legs: list[LegEnded] = []
    """The ended ones, in the order in which they ended."""


class KeptReply(msgspec.Struct, array_like=True):
    """A kept reply with all of its content, as the journal stores it."""

    spec: RoundSpec
    ended: RoundEnded
    prompts: list[Prompt]
    """One per entry of `ended.deliver`."""
    samples: list[FinishedSample]
    acknowledged: bool = False
    trajectories: list[SavedTrajectory] = []
    """One per entry of `ended.trajectories`."""


class Restored(msgspec.Struct, tag=True):
    """What a restarted server reads from its journal for the HTTP process; sent before any other event."""

    groups: list[tuple[str, Prompt]]
    """(run, prompt) of every undelivered group."""
    unjudged: list[tuple[str, str]]
    """(run, prompt id) of the whole ones without a verdict."""
    finished: list[FinishedSample]
    """In the order in which they finished."""
    rounds: list[RoundSpec]
    """Rounds that are open again."""
    replies: list[KeptReply]
    gone: list[str]
    """Ids of rounds whose replies are no longer kept."""
    unnamed: bool
    """No round is admitted until the policy version is named (`no-step-on-unknown-weights`)."""
    warnings: list[str]
    trajectories: list[SavedTrajectory] = []
    """The undelivered ones."""


class Named(msgspec.Struct, tag=True):
    """The engine has the weights of a named policy version again: open rounds may run."""

    version: int


class EndedRequest(msgspec.Struct):
    """What the answer to an attached request tells of how its output was drawn."""

    rid: str
    spans: list[Span]
    policy_version: int
    """Policy version when the request ended."""
    drawn: tuple[Prompt, FinishedSample] | None = None
    """What the audit needs, if the server has one and the request was not aborted."""


class AttachedEnded(msgspec.Struct, tag=True):
    """Attached requests have ended in one step of which no other message tells, or which the audit needs."""

    requests: list[EndedRequest]


class RoundWaits(msgspec.Struct, tag=True):
    """A round of trajectories has met its quota, and waits for mandatory ones."""

    round_id: str


class TrajectoriesRemoved(msgspec.Struct, tag=True):
    """Trajectories were removed without delivery: rejected, or unused for a long time."""

    run: str
    ids: list[str]


class JournalFault(msgspec.Struct, tag=True):
    """Why the journal cannot be written; an empty reason means that it can be written again."""

    reason: str


Event = (
    Answer
    | Finished
    | RoundEnded
    | AttachedEnded
    | LegEnded
    | RoundWaits
    | TrajectoriesRemoved
    | Restored
    | Named
    | JournalFault
)
