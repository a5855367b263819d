"""The results of a rollout as typed objects with numpy arrays."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_april.api.types import EndReason
from sglang_april.api.types import Span as Span

Ints = np.ndarray
"""int32, one dimension, read-only."""
Floats = np.ndarray
"""float32, one dimension, read-only."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSample:
    """One finished response."""

    index: int
    output_ids: Ints
    """[output_len], including the stop or EOS token."""
    text: str | None
    finish_reason: dict[str, Any]
    seed: int
    logprobs: Floats
    """[output_len], natural logarithms of the probabilities of the drawn tokens."""
    logprob_kind: str
    spans: list[Span]
    top_logprobs: list[list[tuple[float, int]]] | None = None
    """Per output token, pairs (logprob, token id)."""
    proximal_logprobs: Floats | None = None
    """[output_len], NaN where absent."""
    proximal_version: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RolloutGroup:
    """The samples of one prompt: all of them if `complete`; with `quota_unit: sample` possibly only some."""

    id: str
    incarnation: int
    metadata: Any
    prompt_ids: Ints
    complete: bool
    accepted: bool | None
    samples: list[RolloutSample]
    delivered: bool = True
    """Whether this round delivers it. A preview (False) may be carried to the next round: do not train on it."""


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryLeg:
    """One request of a trajectory, and its answer."""

    leg: int
    rid: str
    parent: int | None
    """The leg whose sequence, prompt and output, begins with the first `shared` tokens of this leg's prompt."""
    shared: int
    prompt_ids: Ints
    """[prompt_len − shared]: the prompt after those tokens."""
    output_ids: Ints
    """[output_len], including the stop or EOS token."""
    logprobs: Floats
    """[output_len], natural logarithms of the probabilities of the drawn tokens."""
    spans: list[Span]
    finish_reason: dict[str, Any]
    reused: int
    """Prompt tokens whose KV existed already."""
    prefilled: int


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryBranch:
    """The sequence of a leg that no other leg continues."""

    legs: list[int]
    shared: int
    """Number of leading ids that an earlier branch contains as well."""
    ids: Ints
    """[N], prompt and output ids of all legs, in order."""
    drawn: list[tuple[int, int]]
    """Ranges of `ids` that the model drew, in ascending order. All other ids came from outside."""
    logprobs: Floats
    """[N], NaN outside of `drawn`."""
    spans: list[Span]
    """Their `start` and `end` are positions in `ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTrajectory:
    """The token-exact record of a trajectory (docs/trajectories.md)."""

    id: str
    run: str
    group: str
    reward: float | None
    metadata: Any
    legs: list[TrajectoryLeg]
    branches: list[TrajectoryBranch]
    state: str = "done"
    staleness: int | None = None
    """The policy version minus that of the oldest token; None in a reply of a round."""
    tokens: int | None = None
    """Output tokens so far, also of legs that have not ended; None in a reply of a round."""
    mismatches: int = 0
    """Legs whose prompts continue no leg that had ended, although there was one."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutReply:
    """What a round delivered, what it carried over to the next one, and its statistics."""

    round_id: str
    run: str
    policy_version: int
    end_reason: EndReason
    carried: dict[str, Any]
    stats: dict[str, Any]
    finished: list[RolloutGroup] = field(default_factory=list)
    trajectories: list[RecordedTrajectory] = field(default_factory=list)
    """The delivered trajectories of a round of trajectories, which has no `finished` groups."""
    rejected: list[str] = field(default_factory=list)
    """Ids of trajectories rejected since the last reply; empty in other rounds."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutSummary:
    """The end of a stream: a reply that names its groups instead of repeating them."""

    round_id: str
    run: str
    policy_version: int
    end_reason: EndReason
    delivered: list[dict[str, Any]]
    """Fields `id`, `incarnation`, `indices`, `complete` and `accepted` of each group that this round delivers."""
    carried: dict[str, Any]
    stats: dict[str, Any]
    groups: list[RolloutGroup] = field(default_factory=list)
    """The delivered groups themselves, joined by the client from the stream: what to train on."""


def read_reply(fields: dict[str, Any]) -> RolloutReply:
    """A reply from its decoded body, JSON or msgpack."""
    delivered: dict[str, Any] = {
        "finished": [read_group(group) for group in fields.get("finished", ())],
        "trajectories": [read_trajectory(record) for record in fields.get("trajectories", ())],
    }
    return RolloutReply(**{**fields, **delivered})


def read_trajectory(fields: dict[str, Any]) -> RecordedTrajectory:
    """The record of a trajectory from its decoded form."""
    legs = [
        TrajectoryLeg(
            **{
                **leg,
                "prompt_ids": _array(leg["prompt_ids"], "<i4"),
                "output_ids": _array(leg["output_ids"], "<i4"),
                "logprobs": _array(leg["logprobs"], "<f4"),
                "spans": [Span(**span) for span in leg["spans"]],
            }
        )
        for leg in fields["legs"]
    ]
    branches = [
        TrajectoryBranch(
            **{
                **branch,
                "ids": _array(branch["ids"], "<i4"),
                "drawn": [(start, end) for start, end in branch["drawn"]],
                "logprobs": _array(branch["logprobs"], "<f4"),
                "spans": [Span(**span) for span in branch["spans"]],
            }
        )
        for branch in fields["branches"]
    ]
    return RecordedTrajectory(**{**fields, "legs": legs, "branches": branches})


def read_group(fields: dict[str, Any]) -> RolloutGroup:
    """A group from its decoded form."""
    samples = [_sample(sample) for sample in fields["samples"]]
    return RolloutGroup(**{**fields, "prompt_ids": _array(fields["prompt_ids"], "<i4"), "samples": samples})


def read_event(fields: dict[str, Any]) -> RolloutGroup | RolloutSummary:
    """One event of a stream."""
    rest = {name: value for name, value in fields.items() if name != "event"}
    return RolloutSummary(**rest) if fields["event"] == "round" else read_group(rest)


def _sample(fields: dict[str, Any]) -> RolloutSample:
    arrays: dict[str, Any] = {
        "output_ids": _array(fields["output_ids"], "<i4"),
        "logprobs": _array(fields["logprobs"], "<f4"),
        "spans": [Span(**span) for span in fields["spans"]],
    }
    if fields.get("proximal_logprobs") is not None:
        arrays["proximal_logprobs"] = _array(fields["proximal_logprobs"], "<f4")
    if fields.get("top_logprobs") is not None:
        arrays["top_logprobs"] = [[(value, token) for value, token in row] for row in fields["top_logprobs"]]
    return RolloutSample(**{**fields, **arrays})


def _array(values: bytes | list[Any], dtype: str) -> np.ndarray:
    """An array over raw little-endian bytes (no copy), or from a JSON list, in which null becomes NaN."""
    array = np.frombuffer(values, dtype) if isinstance(values, bytes) else np.array(values, dtype=dtype)
    array.flags.writeable = False
    return array
