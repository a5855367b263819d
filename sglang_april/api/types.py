"""Data shared by requests, messages, the journal and the client: literals, prompts, round specs, samples.

Token ids are little-endian int32 and logprobs little-endian float32, as raw bytes: encoding lists of Python numbers
would block the event loops of both processes.
"""

from typing import Any, Literal

import msgspec

from sglang_april.api.run_keys import run_key

RUN, TRAJECTORY, GROUP = "x-april-run", "x-april-trajectory", "x-april-group"
"""Headers of an attached request, or keys of its `sampling_params.custom_params`."""


def forwarded(header: str) -> str:
    """The header that means the same behind SGLang's router, which drops `x-april-…` and forwards `x-request-id-…`."""
    return header.replace("x-", "x-request-id-", 1)


MAX_RUNS = 2**10
"""Runs of which something is remembered that no caller deletes."""

REMEMBERED = 2**16
"""Ids that are remembered of rounds without a kept reply (410, not 404), and of trajectories that have left."""

Unit = Literal["group", "sample", "trajectory"]
KvPolicy = Literal["keep", "recompute", "auto"]
Provenance = Literal["fresh", "kept", "recomputed"]
Count = Literal["finished", "accepted"]
EndReason = Literal["quota", "stopped", "exhausted", "waited"]
Tier = Literal["auto", "device", "host", "disk", "none"]


class Prompt(msgspec.Struct, array_like=True):
    """One prompt of an accepted request; its `n` samples form a group."""

    id: str
    input_ids: bytes
    """int32 [prompt_len]."""
    n: int
    params: int
    """Index into the `params` of the command that carries the prompt."""
    seed: int
    """`sampling_seed` of the prompt, else of the round, else 0."""
    top_logprobs_num: int = 0
    priority: int | None = None
    metadata: bytes = b""
    """The caller's metadata as msgpack, opaque to the scheduler; empty if none was given."""
    max_new_tokens: list[int] | None = None
    """One limit per sample; None if `params` holds one limit for all."""
    skip_special_tokens: bool = True
    """This field and the following ones are for building the reply; the scheduler ignores them."""
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    truncates: bool = False
    """Whether top-k, top-p or min-p cut the distribution the tokens were drawn from (`behaviour-logprobs`)."""
    rescore: float | str = "accepted by an earlier server"
    """The temperature at which a plain prefill gives the same logprobs, or what prevents that (`audited-logprobs`)."""


class Extension(msgspec.Struct, array_like=True):
    """An answered `extend` with an `idempotency_key`: a repeated call gets the same answer."""

    fingerprint: str
    """Digest of its body."""
    answer: dict[str, Any]


class RoundSpec(msgspec.Struct):
    """What a rollout request asks for, prompts apart, with the launch defaults filled in.

    A field that `requests.RolloutBody` has under the same name is copied from there (`http.prepare.round_spec`).
    """

    round_id: str
    run: str
    quota: int | None
    quota_unit: Unit
    kv: KvPolicy
    max_staleness: int | None
    surplus: Literal["carry", "return"] = "carry"
    concurrency: int | Literal["auto"] | None = None
    proximal: bool = False
    tier: Tier = "auto"
    keep_until_ack: bool = False
    count: Count = "finished"
    after_quota: Literal["suspend", "continue"] = "suspend"
    ahead: int = 1
    """With `after_quota: continue`, how many quotas of finished groups may wait for the next round."""
    quota_mode: Literal["first", "cohort"] = "first"
    cohort_rounds: int = 1
    sampling_defaults: bytes = b""
    """msgpack of the request's `sampling_params`, for the prompts of a later `extend`; opaque to the scheduler."""
    trajectories: bool = False
    """Its units are trajectories, or groups of `n` of them (docs/trajectories.md)."""
    n: int = 1
    """Trajectories of a group."""
    wait_s: float | None = None
    """How many seconds the round waits for mandatory trajectories after it has met its quota; None: no limit."""
    fingerprint: str = ""
    """Digest of the request body: a repeated request has the same one, also after a restart."""
    extensions: dict[str, Extension] = {}
    """By `idempotency_key`; the scheduler adds them, for the journal."""

    @property
    def run_key(self) -> str:
        """The run whose samples it counts (`run_keys.py`)."""
        return run_key("legs" if self.trajectories else "prompts", self.run)

    @property
    def judged(self) -> bool:
        """`count: accepted`: only groups that the caller accepts count towards the quota."""
        return self.count == "accepted"


class Span(msgspec.Struct, array_like=True, frozen=True):
    """Output tokens [start, end) drawn under `version`, on KV that was fresh, kept or recomputed."""

    start: int
    end: int
    version: int
    kv: Provenance


class FinishedSample(msgspec.Struct, array_like=True):
    """A finished sample; sent once, in the step in which it finishes."""

    run: str
    id: str
    incarnation: int
    index: int
    output_ids: bytes
    """int32 [output_len], including the stop or EOS token."""
    logprobs: bytes
    """float32 [output_len] (`behaviour-logprobs`); shorter only if the sample failed before it drew a token."""
    spans: list[Span]
    finish_reason: dict[str, Any]
    """SGLang's own form: `{"type": "stop", "matched": 1}`, `{"type": "length", "length": 16}`, …"""
    seed: int
    top_logprobs: list[list[tuple[float, int]]] | None = None
    """Per output token, `top_logprobs_num` pairs (logprob, token id)."""
    proximal_logprobs: bytes | None = None
    """float32 [output_len]; NaN where there is none."""
    proximal_version: int | None = None
    whole: bool = False
    """True on the sample that completes its group."""
    round_id: str | None = None
    """The open round in which it finished."""


class Delivery(msgspec.Struct, array_like=True):
    """A group (or, with `quota_unit: sample`, the samples of it in `indices`) that a reply contains."""

    id: str
    incarnation: int
    indices: list[int]
    complete: bool
    accepted: bool | None = None
    """The caller's verdict on the group; None if it was not judged."""
