"""The events of a streamed round, also over several connections."""

import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import msgspec

from sglang_april.client.calls import as_error
from sglang_april.client.types import RolloutGroup, RolloutSample, RolloutSummary, read_event

log = logging.getLogger("sglang_april")

SampleKey = tuple[str, int, int]
"""Prompt id, incarnation, index."""


class LineSplitter:
    """Splits the body of a stream into lines, at newlines only: httpx splits at U+2028 and others too, which JSON
    strings may contain."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def lines(self, chunk: bytes) -> list[bytes]:
        """The lines that this part of the body completes."""
        first, *others = chunk.split(b"\n")
        self._begun.append(first)
        if not others:
            return []
        whole = [b"".join(self._begun), *others[:-1]]
        self._begun = [others[-1]]
        return whole

    def rest(self) -> list[bytes]:
        """At the end of the body: the last line, if no newline ends it."""
        rest = b"".join(self._begun)
        return [rest] if rest else []


def lines_of(response: httpx.Response) -> Iterator[bytes]:
    """The lines of a body as they arrive."""
    splitter = LineSplitter()
    for chunk in response.iter_bytes():
        yield from splitter.lines(chunk)
    yield from splitter.rest()


async def async_lines_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """The same for an asynchronous client."""
    splitter = LineSplitter()
    async for chunk in response.aiter_bytes():
        for line in splitter.lines(chunk):
            yield line
    for line in splitter.rest():
        yield line


def event(line: bytes) -> RolloutGroup | RolloutSummary | None:
    """One line of a stream; None for the reason why the round waits, which is logged.

    Raises:
        AprilError: it is the error event.
    """
    fields = msgspec.json.decode(line)
    if fields["event"] == "error":
        raise as_error(fields.get("status", 500), fields["error"])
    if fields["event"] == "waiting":
        log.warning("still waiting: %s", fields["reason"])
        return None
    return read_event(fields)


class StreamedRound:
    """What a round has sent, also over several connections."""

    def __init__(self) -> None:
        self._received: dict[SampleKey, tuple[RolloutGroup, RolloutSample]] = {}

    def new(self, received: RolloutGroup | RolloutSummary) -> RolloutGroup | RolloutSummary | None:
        """The event without samples that an earlier one had; None if it has no others.

        A summary is given the delivered groups.
        """
        if isinstance(received, RolloutSummary):
            received.groups.extend(map(self._delivered, received.delivered))
            return received
        new = {}
        for sample in received.samples:
            key = received.id, received.incarnation, sample.index
            if key not in self._received:
                new[key] = received, sample
        self._received |= new
        return dataclasses.replace(received, samples=[sample for _, sample in new.values()]) if new else None

    def _delivered(self, entry: Mapping[str, Any]) -> RolloutGroup:
        parts = [self._received[entry["id"], entry["incarnation"], index] for index in entry["indices"]]
        return dataclasses.replace(
            parts[0][0],
            samples=[sample for _, sample in parts],
            complete=entry["complete"],
            accepted=entry["accepted"],
            delivered=True,
        )
