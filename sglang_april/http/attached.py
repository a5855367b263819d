"""What the scheduler reports of an attached request at its end (`attached-request`).

The answer contains it, except that of a leg, which waits for the record of the leg, and that of a request that ended
before SGLang had a token of it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_april.api.messages import EndedRequest

logger = logging.getLogger("sglang_april")

UNTAKEN = 2**12
"""Maximum number of descriptions kept for requests whose callers have disconnected."""
LIMIT_S = 10.0
"""Longest wait of an answer for its description, in seconds. The scheduler sends it in the same step; that of a leg
follows the leg's record."""


class AttachedRequests:
    """Descriptions by `rid`. They and the answers arrive through different processes, in any order."""

    def __init__(self, journal_fault: Callable[[], str] = lambda: "") -> None:
        """`journal_fault`: why the journal cannot be written now, or an empty string."""
        self._journal_fault = journal_fault
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()
        self._waiting: dict[str, asyncio.Future[EndedRequest]] = {}
        self._warned = False

    def receive(self, ended: EndedRequest) -> None:
        """Store the description of a request that has ended in the scheduler."""
        future = self._waiting.pop(ended.rid, None)
        if future is not None and not future.done():
            future.set_result(ended)
            return
        self._ended[ended.rid] = ended
        if len(self._ended) > UNTAKEN:
            self._ended.popitem(last=False)

    def is_awaited(self, rid: object) -> bool:
        """Whether the answer to a request of this `rid`, unchecked, still waits for its description."""
        return isinstance(rid, str) and rid in self._waiting

    def forget(self, rid: str) -> None:
        """A request is sent: what is known of an earlier one with its `rid` does not describe it."""
        self._ended.pop(rid, None)

    async def description(self, rid: str, *, leg: bool = False) -> dict[str, Any]:
        """`spans`, `staleness` and `policy_version` of an answered request; empty if the scheduler never had it.

        A leg's answer waits as long as the journal cannot be written (`journal-before-reply`).
        """
        try:
            ended = self._ended.pop(rid, None) or await self._next(rid, leg)
        except TimeoutError:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "request %s is answered without spans, because the scheduler has not described it within %g s; "
                    "this is logged once",
                    rid,
                    LIMIT_S,
                )
            return {}
        return _fields(ended)

    async def _next(self, rid: str, leg: bool) -> EndedRequest:
        future = self._waiting[rid] = asyncio.get_running_loop().create_future()
        try:
            while not (await asyncio.wait((future,), timeout=LIMIT_S))[0]:
                if not (leg and self._journal_fault()):
                    raise TimeoutError
            return future.result()
        finally:
            self._waiting.pop(rid, None)


def read_description(text: str) -> dict[str, Any]:
    """`spans`, `staleness` and `policy_version` from an `EndedRequest` in JSON."""
    return _fields(msgspec.json.decode(text, type=EndedRequest))


def _fields(ended: EndedRequest) -> dict[str, Any]:
    oldest = ended.spans[0].version if ended.spans else ended.policy_version
    return {
        "spans": [{"start": s.start, "end": s.end, "version": s.version, "kv": s.kv} for s in ended.spans],
        "policy_version": ended.policy_version,
        "staleness": ended.policy_version - oldest,
    }
