"""Rounds by id (`idempotent-round`): one open round per run, and the replies that are kept (`kept-replies`)."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import RoundSpec
from sglang_april.http.completed_groups import GroupSlice
from sglang_april.http.reply import Reply

REMEMBERED = 2**16
"""How many ids of rounds whose replies are gone are remembered, to tell 410 from 404."""


@dataclass(eq=False)
class RoundRecord:
    """A rollout request from its arrival until its reply is no longer kept."""

    spec: RoundSpec
    acknowledged: bool = False
    verdicts: dict[str, bool] = field(default_factory=dict)
    """What the caller has said so far, by prompt id."""
    state: Literal["opening", "open", "ended"] = "opening"
    events: list[GroupSlice] = field(default_factory=list)
    """What a stream of this round says, in order; kept so that a replay says the same."""
    opened: "asyncio.Future[None]" = field(default_factory=lambda: _future())
    reply: "asyncio.Future[Reply]" = field(default_factory=lambda: _future())
    bell: asyncio.Event = field(default_factory=asyncio.Event)

    def ring(self) -> None:
        """Wake those who follow the events; whoever waits next gets a new bell."""
        self.bell.set()
        self.bell = asyncio.Event()

    def repeats(self, accept: list[str], reject: list[str]) -> bool:
        """Whether all this has been said before."""
        said = self.verdicts.get
        return all(said(i) is True for i in accept) and all(said(i) is False for i in reject)

    @property
    def id(self) -> str:
        return self.spec.round_id

    @property
    def run(self) -> str:
        return self.spec.run

    @property
    def protected(self) -> bool:
        """Whether the reply must stay until it is acknowledged."""
        return self.spec.keep_until_ack and not self.acknowledged


class RoundRegistry:
    """All rounds that the server knows. Every method is synchronous, so none is ever seen half done."""

    def __init__(self, replies_per_run: int, reply_bytes: int) -> None:
        self._per_run = replies_per_run
        self._capacity = reply_bytes
        self._rounds: dict[str, RoundRecord] = {}
        self._open_of_run: dict[str, RoundRecord] = {}
        self._kept: OrderedDict[str, RoundRecord] = OrderedDict()
        self._bytes = 0
        self._gone: OrderedDict[str, None] = OrderedDict()

    @property
    def open(self) -> list[RoundRecord]:
        """Rounds that open or are open."""
        return list(self._open_of_run.values())

    @property
    def kept(self) -> int:
        """How many replies are kept."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Their size in memory."""
        return self._bytes

    def admit(self, candidate: RoundRecord) -> tuple[RoundRecord, bool]:
        """The round that a request means, and whether it is new; Refused with 409, 410 or 503."""
        known = self._rounds.get(candidate.id)
        if known is not None:
            if known.spec.fingerprint != candidate.spec.fingerprint:
                raise RequestError(409, "round_id", f"{candidate.id} was used with another body")
            return known, False
        if candidate.id in self._gone:
            raise _gone(candidate.id)
        busy = self._open_of_run.get(candidate.run)
        if busy is not None:
            raise RequestError(409, "run", f"run {candidate.run!r} has an open round, {busy.id}")
        unacknowledged = sum(r.reply.result().nbytes for r in self._kept.values() if r.protected)
        if unacknowledged >= self._capacity:
            reason = f"replies of {unacknowledged} bytes wait for their ack, and --april-reply-gb is reached"
            raise RequestError(503, "keep_until_ack", reason)
        self._rounds[candidate.id] = self._open_of_run[candidate.run] = candidate
        return candidate, True

    def find(self, round_id: str) -> RoundRecord:
        """The round, or Refused with 410 if its reply is no longer kept, 404 if it never was."""
        known = self._rounds.get(round_id)
        if known is not None:
            return known
        if round_id in self._gone:
            raise _gone(round_id)
        raise RequestError(404, "round_id", f"there is no round {round_id}")

    def knows(self, round_id: str | None) -> bool:
        """Whether a round of this id is open, or its reply kept."""
        return round_id in self._rounds

    def reopened(self, round_: RoundRecord) -> None:
        """A round that was open when the server died."""
        self._rounds[round_.id] = self._open_of_run[round_.run] = round_
        self.opened(round_)

    def restored(self, round_: RoundRecord, reply: Reply) -> None:
        """A reply that was kept when the server died; older ones come first."""
        self._rounds[round_.id] = round_
        round_.state = "ended"
        round_.opened.set_result(None)
        self.keep(round_, reply)

    def forgotten(self, round_ids: list[str]) -> None:
        """Rounds whose replies were no longer kept when the server died, the oldest first."""
        self._gone |= dict.fromkeys(round_ids[-REMEMBERED:])

    def refuse(self, round_: RoundRecord, error: RequestError) -> None:
        """A round that did not open leaves no trace."""
        del self._rounds[round_.id]
        del self._open_of_run[round_.run]
        round_.opened.set_exception(error)
        round_.ring()

    def opened(self, round_: RoundRecord) -> None:
        """The scheduler has accepted the round."""
        round_.state = "open"
        round_.opened.set_result(None)

    def ended(self, round_: RoundRecord) -> None:
        """The round is over and its run free for the next; the reply follows."""
        round_.state = "ended"
        del self._open_of_run[round_.run]

    def keep(self, round_: RoundRecord, reply: Reply) -> None:
        """Keep the reply of an ended round, and let go of those that need not be kept any longer."""
        self._kept[round_.id] = round_
        self._bytes += reply.nbytes
        round_.reply.set_result(reply)
        round_.ring()
        self._trim()

    def failed(self, round_: RoundRecord, error: RequestError) -> None:
        """A fault of ours: those who wait are told, and the id is not kept."""
        del self._rounds[round_.id]
        round_.reply.set_exception(error)
        round_.ring()

    def acknowledge(self, round_id: str) -> RoundRecord:
        """The caller has the reply for good; from now on it is kept like any other. Idempotent."""
        round_ = self.find(round_id)
        if not round_.reply.done():
            raise RequestError(409, "round_id", f"round {round_id} has no reply yet")
        round_.acknowledged = True
        self._trim()
        return round_

    def _trim(self) -> None:
        """Let go of the oldest replies beyond the last few of their run, or beyond the memory for all of them.

        The newest reply always stays: its caller is being answered from it.
        """
        newer: dict[str, int] = {}
        total = 0
        for i, round_ in enumerate(reversed(list(self._kept.values()))):
            total += round_.reply.result().nbytes
            count = newer[round_.run] = newer.get(round_.run, 0) + 1
            if i and not round_.protected and (count > self._per_run or total > self._capacity):
                self._forget(round_)

    def _forget(self, round_: RoundRecord) -> None:
        del self._kept[round_.id], self._rounds[round_.id]
        self._bytes -= round_.reply.result().nbytes
        self._gone[round_.id] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)


def _future() -> "asyncio.Future[Any]":
    """A future whose exception may stay unread: perhaps nobody waits any longer."""
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def _gone(round_id: str) -> RequestError:
    return RequestError(410, "round_id", f"the reply of round {round_id} is no longer kept")
