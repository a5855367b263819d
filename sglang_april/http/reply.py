"""The reply of a round: groups as JSON, or as msgpack with raw arrays, and statistics of the delivery.

In msgpack, ids are little-endian int32 and logprobs little-endian float32 as raw bytes, and an absent proximal logprob
is NaN; in JSON they are lists, exact to the last bit of the float32, and absent is null.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.http.completed_groups import CompletedSample, GroupSlice, wait_for_texts
from sglang_april.http.trajectories import TrajectoryRecord

logger = logging.getLogger("sglang_april")

LOGPROB_KIND = "processed"
"""log-softmax after penalties, bias, grammar mask, temperature; before top-k, top-p, min-p (`behaviour-logprobs`)."""

TRUNCATED = (
    "logprobs are those of the distribution before top_k, top_p and min_p; the tokens were drawn from a narrower one"
)

BYTES_PER_REPLY = 2**13
"""What a reply takes without its groups: the record of the round, statistics, carry."""

_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


@dataclass(eq=False)
class Reply:
    """The reply of a round; its content never changes."""

    round_id: str
    run: str
    policy_version: int
    end_reason: messages.EndReason
    parts: list[GroupSlice]
    carried: dict[str, Any]
    stats: dict[str, Any]
    nbytes: int = 0
    """Estimated size in memory."""
    trajectories: list[TrajectoryRecord] | None = None
    """In place of `parts`, what a round of trajectories delivers."""
    rejected: list[str] = field(default_factory=list)
    verdicts: dict[str, bool] = field(default_factory=dict)
    """With `count: accepted`, the verdicts on the round's groups by prompt id."""
    received: bool = False
    """Whether a connection has received it."""

    @classmethod
    async def build(
        cls,
        ended: messages.RoundEnded,
        parts: list[GroupSlice],
        trajectories: list[TrajectoryRecord] | None = None,
    ) -> "Reply":
        """Wait for the last texts and add the statistics of the delivery."""
        await wait_for_texts(parts)
        stats = dict(ended.stats)
        legs = [leg.result for record in trajectories or () for leg in record.legs.values()]
        stats["delivered"] = delivery_stats(parts, ended.policy_version, legs)
        if trajectories is not None:
            stats["delivered"]["trajectories"] = len(trajectories)
        stats["carried_length"] = _distribution(np.frombuffer(ended.carried_lengths, "<i4"))
        if any(part.prompt.truncates for part in parts):
            stats["warnings"] = [*stats.get("warnings", ()), TRUNCATED]
        nbytes = BYTES_PER_REPLY + sum(size_of(part) for part in parts)
        nbytes += sum(record.nbytes for record in trajectories or ())
        return cls(
            ended.round_id,
            ended.run,
            ended.policy_version,
            ended.end_reason,
            parts,
            ended.carried,
            stats,
            nbytes,
            trajectories,
            ended.rejected,
            ended.verdicts,
        )

    def encode(self, packed: bool) -> bytes:
        """The whole body, encoded group by group, so that other threads can run in between."""
        encoder = _msgpack if packed else _json
        if self.trajectories is not None:
            records = [encoder.encode(record.fields(packed)) for record in self.trajectories]
            self._stamp()
            content = {"trajectories": [msgspec.Raw(record) for record in records], "rejected": self.rejected}
            return encoder.encode(self._head() | content)
        groups = [encode_group(part, packed) for part in self.parts]
        self._stamp()
        return encoder.encode(self._head() | {"finished": [msgspec.Raw(group) for group in groups]})

    def summary(self) -> dict[str, Any]:
        """The last event of a stream: the reply with the keys of the delivered groups instead of their content."""
        self._stamp()
        delivered = [
            {
                "id": part.prompt.id,
                "incarnation": part.incarnation,
                "indices": [done.sample.index for done in part.done],
                "complete": part.complete,
                "accepted": part.accepted,
            }
            for part in self.parts
        ]
        return {"event": "round", **self._head(), "delivered": delivered}

    def _head(self) -> dict[str, Any]:
        return {
            "round_id": self.round_id,
            "run": self.run,
            "policy_version": self.policy_version,
            "end_reason": self.end_reason,
            "carried": self.carried,
            "stats": self.stats,
        }

    def _stamp(self) -> None:
        """A connection gets the reply; set once the seconds from the met quota until then."""
        self.received = True
        if self.stats.get("t_quota_met") is not None:
            self.stats.setdefault("quota_to_reply_s", max(0.0, time.time() - self.stats["t_quota_met"]))


def encode_group(part: GroupSlice, packed: bool) -> bytes:
    """One group as a value of `finished`."""
    return _encode_group(part, packed, {})


def encode_event(part: GroupSlice, delivered: bool) -> bytes:
    """One group as a line of a stream: delivered by the round, or a preview."""
    return _encode_group(part, False, {"event": "group", "delivered": delivered}) + b"\n"


def _encode_group(part: GroupSlice, packed: bool, head: dict[str, Any]) -> bytes:
    encoder = _msgpack if packed else _json
    prompt = part.prompt
    fields = {
        **head,
        "id": prompt.id,
        "incarnation": part.incarnation,
        "metadata": _metadata(prompt.metadata, packed),
        "prompt_ids": _ints(prompt.input_ids, packed),
        "complete": part.complete,
        "accepted": part.accepted,
        "samples": [msgspec.Raw(encoder.encode(_sample_fields(done, packed))) for done in part.done],
    }
    return encoder.encode(fields)


def _sample_fields(done: CompletedSample, packed: bool) -> dict[str, Any]:
    sample = done.sample
    fields: dict[str, Any] = {
        "index": sample.index,
        "output_ids": _ints(sample.output_ids, packed),
        "text": done.text.result(),
        "finish_reason": sample.finish_reason,
        "seed": sample.seed,
        "logprobs": _floats(sample.logprobs, packed),
        "logprob_kind": LOGPROB_KIND,
        "spans": [{"start": s.start, "end": s.end, "version": s.version, "kv": s.kv} for s in sample.spans],
    }
    if sample.top_logprobs is not None:
        fields["top_logprobs"] = sample.top_logprobs
    if sample.proximal_logprobs is not None:
        fields["proximal_logprobs"] = _floats(sample.proximal_logprobs, packed)
        fields["proximal_version"] = sample.proximal_version
    return fields


def _ints(raw: bytes, packed: bool) -> bytes | list[int]:
    return raw if packed else np.frombuffer(raw, "<i4").tolist()


def _floats(raw: bytes, packed: bool) -> bytes | list[float]:
    """msgspec encodes NaN as null in JSON."""
    return raw if packed else np.frombuffer(raw, "<f4").tolist()


def _metadata(raw: bytes, packed: bool) -> Any:
    if not raw:
        return None
    return msgspec.Raw(raw) if packed else msgspec.msgpack.decode(raw)


def size_of(part: GroupSlice) -> int:
    """Estimated bytes of memory of a group whose texts are decoded."""
    own = len(part.prompt.input_ids) + len(part.prompt.metadata)
    return own + sum(_sample_size(done) for done in part.done)


def _sample_size(done: CompletedSample) -> int:
    sample = done.sample
    pairs = sum(len(row) for row in sample.top_logprobs or ())
    text = len(done.text.result() or "")
    tokens = len(sample.output_ids) + len(sample.logprobs) + len(sample.proximal_logprobs or b"")
    return tokens + text + 64 * len(sample.spans) + 96 * pairs + 512


def delivery_stats(
    parts: list[GroupSlice], policy_version: int, legs: Sequence[messages.FinishedSample] = ()
) -> dict[str, Any]:
    """Length distribution of the delivered samples, and their tokens by version and by provenance of the KV.

    Off-policy are tokens of an older version than `policy_version`; hybrid are tokens of this version on kept KV.
    """
    samples = [*(done.sample for part in parts for done in part.done), *legs]
    lengths = np.array([len(sample.output_ids) // 4 for sample in samples], dtype=np.int64)
    versions: Counter[int] = Counter()
    provenance: Counter[str] = Counter()
    ages: Counter[int] = Counter()
    hybrid = 0
    for sample in samples:
        ages[policy_version - min((span.version for span in sample.spans), default=policy_version)] += 1
        for span in sample.spans:
            tokens = span.end - span.start
            versions[span.version] += tokens
            provenance[span.kv] += tokens
            hybrid += tokens * (span.version == policy_version and span.kv == "kept")
    total = int(lengths.sum())
    return {
        "groups": len(parts),
        "samples": len(samples),
        "accepted": sum(part.accepted is True for part in parts),
        "rejected": sum(part.accepted is False for part in parts),
        "tokens": total,
        "length": _distribution(lengths),
        "samples_by_staleness": {str(age): count for age, count in sorted(ages.items())},
        "tokens_by_version": {str(version): count for version, count in sorted(versions.items())},
        "tokens_by_kv": {kv: provenance[kv] for kv in ("fresh", "kept", "recomputed")},
        "off_policy_share": (sum(versions.values()) - versions[policy_version]) / total if total else 0.0,
        "hybrid_share": hybrid / total if total else 0.0,
    }


def _distribution(lengths: np.ndarray) -> dict[str, float]:
    if not lengths.size:
        return {}
    p50, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    return {
        "min": int(lengths.min()),
        "mean": float(lengths.mean()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": int(lengths.max()),
    }


def log_reply(reply: Reply) -> None:
    """One line per round in the server's log."""
    delivered, carried, stats = reply.stats["delivered"], reply.carried, reply.stats
    logger.info(
        "round %s of run %s: %s at version %d, delivered %d groups %d samples %d tokens, carried %s groups %s samples, "
        "%s tokens after the quota, %s re-prefilled, reply built in %s s",
        reply.round_id,
        reply.run,
        reply.end_reason,
        reply.policy_version,
        delivered.get("trajectories", delivered["groups"]),
        delivered["samples"],
        delivered["tokens"],
        carried.get("groups", 0),
        carried.get("samples", 0),
        stats.get("tokens_after_quota", 0),
        stats.get("reprefilled_tokens", 0),
        f"{stats['quota_to_built_s']:.4f}" if "quota_to_built_s" in stats else "-",
    )
