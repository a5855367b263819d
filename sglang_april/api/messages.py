"""All messages between the HTTP process and the scheduler, and their encoding.

The SGLang envelope of a message, one `bytes` field, is in `sglang_april/adapter/core/envelope.py`.
"""

import msgspec

from sglang_april.api.commands import (
    Acknowledge,
    Command,
    DeleteReply,
    Drop,
    EndTrajectories,
    ExtendRound,
    Freeze,
    GetPartials,
    GetState,
    GetTrajectory,
    JudgeRound,
    Lasting,
    OpenRound,
    PushBegin,
    PushEnd,
    Shutdown,
    StopRound,
    Thaw,
)
from sglang_april.api.events import (
    Answer,
    AttachedEnded,
    EndedRequest,
    Event,
    Finished,
    JournalFault,
    KeptReply,
    LegEnded,
    Named,
    Restored,
    RoundEnded,
    RoundWaits,
    SavedTrajectory,
    TrajectoriesRemoved,
    count_verdicts,
)
from sglang_april.api.observations import Moved, Rates, Tuned
from sglang_april.api.types import (
    Count,
    Delivery,
    EndReason,
    Extension,
    FinishedSample,
    KvPolicy,
    Prompt,
    Provenance,
    RoundSpec,
    Span,
    Tier,
    Unit,
)

__all__ = [
    "Acknowledge",
    "Answer",
    "AttachedEnded",
    "Command",
    "Count",
    "DeleteReply",
    "Delivery",
    "Drop",
    "EndReason",
    "EndTrajectories",
    "EndedRequest",
    "Event",
    "ExtendRound",
    "Extension",
    "Finished",
    "FinishedSample",
    "Freeze",
    "GetPartials",
    "GetState",
    "GetTrajectory",
    "JournalFault",
    "JudgeRound",
    "KeptReply",
    "KvPolicy",
    "Lasting",
    "LegEnded",
    "Moved",
    "Named",
    "Observation",
    "OpenRound",
    "Prompt",
    "Provenance",
    "PushBegin",
    "PushEnd",
    "Rates",
    "Restored",
    "RoundEnded",
    "RoundSpec",
    "RoundWaits",
    "SavedTrajectory",
    "Shutdown",
    "Span",
    "StopRound",
    "Thaw",
    "Tier",
    "TrajectoriesRemoved",
    "Tuned",
    "Unit",
    "count_verdicts",
    "decode_event",
    "decode_message",
    "encode",
]

Observation = Moved | Tuned | Rates
"""An observation of one rank outside of a step. Rank 0 broadcasts it; it has no answer (`rank-determinism`)."""

_encoder = msgspec.msgpack.Encoder()
_messages = msgspec.msgpack.Decoder(Command | Observation)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Observation | Event) -> bytes:
    """A message as msgpack, with its type as a tag."""
    return _encoder.encode(message)


def decode_message(data: bytes) -> Command | Observation:
    """A message to the scheduler."""
    return _messages.decode(data)


def decode_event(data: bytes) -> Event:
    """A message from the scheduler."""
    return _events.decode(data)
