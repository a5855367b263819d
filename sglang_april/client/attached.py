"""Attached requests as a client sends and reads them (docs/attached-requests.md): the names of run and trajectory, and
the fields of `/generate`'s answer. Needs neither a framework nor SGLang."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_april.api.types import GROUP, RUN, TRAJECTORY, forwarded
from sglang_april.client.calls import NotPatchedError
from sglang_april.client.types import Span


def attach(run: str, trajectory: str | None = None, group: str | None = None) -> dict[str, str]:
    """The headers, or `custom_params`, of a request that belongs to a run."""
    names = {RUN: run, TRAJECTORY: trajectory, GROUP: group}
    return {key: name for key, name in names.items() if name is not None}


def attach_through_router(run: str, trajectory: str, group: str | None = None) -> dict[str, str]:
    """The headers of a request through SGLang's router.

    The router drops `x-april-…` and forwards `x-request-id-…`, under which the server reads the same names. With
    `--policy manual`, it sends all requests of a routing key, here run and trajectory, to one engine.
    """
    headers = {forwarded(key): name for key, name in attach(run, trajectory, group).items()}
    return {**headers, "x-smg-routing-key": f"{run}/{trajectory}"}


@dataclass(frozen=True, slots=True)
class Generated:
    """The answer of `/generate` to one attached request."""

    output_ids: list[int]
    logprobs: list[float]
    """One per token; empty without `return_logprob`."""
    spans: list[Span]
    policy_version: int
    """Policy version when the request ended."""
    finish_reason: str
    """`stop`, `length` or `abort`."""

    @property
    def versions(self) -> list[int]:
        """The policy version that drew each token."""
        return [span.version for span in self.spans for _ in range(span.end - span.start)]


def read_generated(answer: Mapping[str, Any]) -> Generated:
    """Read the decoded body of `/generate`.

    Raises:
        NotPatchedError: the request was not attached: the server is plain SGLang, or the request did not ask for it.
    """
    meta = answer["meta_info"]
    april = meta.get("april")
    if april is None:
        raise NotPatchedError(500, "server", "the answer has no spans: the server runs SGLang without sglang-april")
    ids = list(answer.get("output_ids") or [])
    drawn = meta.get("output_token_logprobs") or []
    return Generated(
        ids,
        [float(logprob) for logprob, *_ in drawn][: len(ids)],
        [Span(**span) for span in april.get("spans", ())],
        april.get("policy_version", 0),
        meta["finish_reason"]["type"],
    )
