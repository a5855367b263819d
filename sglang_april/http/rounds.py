"""Rounds by id: the same id is the same round (`idempotent-round`), and which replies are kept (`kept-replies`)."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import FinishedSample, RoundSpec
from sglang_april.api.types import MAX_RUNS, REMEMBERED
from sglang_april.http.completed_groups import CompletedGroups, GroupSlice
from sglang_april.http.reply import Reply

logger = logging.getLogger("sglang_april")


@dataclass(eq=False)
class RoundRecord:
    """A rollout request from its arrival until its reply is no longer kept."""

    spec: RoundSpec
    extensions: dict[str, tuple[str, "asyncio.Future[dict[str, Any]]"]] = field(default_factory=dict)
    """By `idempotency_key`, the fingerprint and the answer of an `extend`."""
    events: list[GroupSlice] = field(default_factory=list)
    """What has finished while the round was open, in order: the previews of its stream, kept for a replay."""
    state: Literal["opening", "open", "ended"] = "opening"
    waits: int = 0
    """How often it has begun to wait for what must finish, its quota met; an `extend` ends a wait."""
    acknowledged: bool = False
    opened: "asyncio.Future[None]" = field(default_factory=lambda: _future())
    reply: "asyncio.Future[Reply]" = field(default_factory=lambda: _future())
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next change of `events` or `reply`, and then replaced."""

    def __post_init__(self) -> None:
        for key, known in self.spec.extensions.items():  # after a restart
            answer = _future()
            answer.set_result({"round_id": self.id, **known.answer})
            self.extensions[key] = known.fingerprint, answer

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

    def notify(self) -> None:
        """Wake the streams of this round."""
        self.changed.set()
        self.changed = asyncio.Event()


class RoundRegistry:
    """All rounds that the server has. Every method is synchronous, so no intermediate state is ever visible."""

    def __init__(self, replies_per_run: int, reply_bytes: int, deleted: Callable[[str], object] | None = None) -> None:
        """`deleted` is called with the id of each round whose reply is no longer kept."""
        self._deleted = deleted or (lambda _round_id: None)
        self._per_run = replies_per_run
        self._capacity = reply_bytes
        self._rounds: dict[str, RoundRecord] = {}
        self._open_of_run: dict[str, RoundRecord] = {}
        self._kept: OrderedDict[str, RoundRecord] = OrderedDict()
        self._bytes = 0
        self._gone: OrderedDict[str, tuple[int, str, str]] = OrderedDict()
        """Ids of rounds without a reply (any more), with the `RequestError` that a request for them gets."""

    @property
    def open(self) -> list[RoundRecord]:
        """Rounds that are opening or open."""
        return list(self._open_of_run.values())

    def open_ids(self) -> list[str]:
        """Ids of the rounds that the scheduler has accepted and not ended, and that weight calls wait for."""
        return [round_.id for round_ in self.open if round_.state == "open" and not round_.spec.trajectories]

    def holding_ids(self) -> list[str]:
        """Ids of the rounds that prevent a release of memory: not those of trajectories, whose legs are suspended."""
        return [round_.id for round_ in self.open if not round_.spec.trajectories]

    @property
    def kept(self) -> int:
        """Number of kept replies."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Their size in memory."""
        return self._bytes

    def admit(self, candidate: RoundRecord) -> tuple[RoundRecord, bool]:
        """The round that a request refers to, and whether it is new.

        Raises:
            RequestError: 409 (another body, or another open round of the run), 410 (reply gone), 500 (the round failed)
                or 503 (memory full).
        """
        known = self._rounds.get(candidate.id)
        if known is not None:
            if known.spec.fingerprint != candidate.spec.fingerprint:
                raise RequestError(409, "round_id", f"{candidate.id} was used with another body")
            return known, False
        if error := self._gone.get(candidate.id):
            raise RequestError(*error)
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
        """The round of this id.

        Raises:
            RequestError: 410 if its reply is no longer kept, 404 if there never was one, 500 if the round failed.
        """
        known = self._rounds.get(round_id)
        if known is not None:
            return known
        if error := self._gone.get(round_id):
            raise RequestError(*error)
        lost = "if there was one, it is lost, because the server was restarted without its journal"
        raise RequestError(404, "round_id", f"there is no round {round_id}: {lost}")

    def contains(self, round_id: str | None) -> bool:
        """Whether a round of this id is open, or its reply kept."""
        return round_id in self._rounds

    # --- after a restart

    def reopen(self, round_: RoundRecord) -> None:
        """Add a round that was open when the server died."""
        self._rounds[round_.id] = self._open_of_run[round_.run] = round_
        self.mark_open(round_)

    def restore_reply(self, round_: RoundRecord, reply: Reply) -> None:
        """Add a reply that was kept when the server died; older ones must be added first."""
        self._rounds[round_.id] = round_
        round_.state = "ended"
        round_.opened.set_result(None)
        self.keep(round_, reply)

    def mark_gone(self, round_ids: list[str]) -> None:
        """Add ids of rounds whose replies are no longer kept, the oldest first."""
        for round_id in round_ids:
            self._forget(round_id)

    # --- from request to reply

    def refuse(self, round_: RoundRecord, error: RequestError) -> None:
        """Remove a round that could not be opened.

        It may have ended before the journal refused it; then it is no longer the open one of its run.
        """
        if round_.state != "ended":
            del self._rounds[round_.id], self._open_of_run[round_.run]
        round_.opened.set_exception(error)
        round_.notify()

    def mark_open(self, round_: RoundRecord) -> None:
        """Mark the round as accepted by the scheduler."""
        round_.state = "open"
        round_.opened.set_result(None)

    def add_finished(self, groups: CompletedGroups, samples: list[FinishedSample]) -> None:
        """Store finished samples, and add them to the event streams of their rounds."""
        changed = set()
        open_rounds = {round_.id: round_ for round_ in self.open}
        for sample in samples:
            group = groups.add(sample)
            round_ = open_rounds.get(sample.round_id or "")
            if group is None:
                logger.warning("a sample of the unknown prompt %r finished", sample.id)
            elif round_ is not None and round_.spec.quota_unit == "sample" and not round_.spec.judged:
                round_.events.append(group.part(sample.whole, [sample.index]))
                changed.add(round_)
            elif round_ is not None and sample.whole:
                round_.events.append(group.part(complete=True))
                changed.add(round_)
        for round_ in changed:
            round_.notify()

    def mark_ended(self, round_: RoundRecord) -> None:
        """Mark the round as ended, so that its run may open the next one; the reply follows."""
        round_.state = "ended"
        del self._open_of_run[round_.run]

    def keep(self, round_: RoundRecord, reply: Reply) -> None:
        """Keep the reply of an ended round, and remove replies beyond the limits."""
        self._kept[round_.id] = round_
        self._bytes += reply.nbytes
        round_.reply.set_result(reply)
        round_.notify()
        self._trim()

    def fail(self, round_: RoundRecord, error: RequestError) -> None:
        """Fail a round by a fault of the server: every request for its id gets the error, now and later."""
        del self._rounds[round_.id]
        self._forget(round_.id, error)
        round_.reply.set_exception(error)
        round_.notify()

    def acknowledge(self, round_id: str) -> RoundRecord | None:
        """Acknowledge a reply that the caller has stored; from now on it is kept like any other. Idempotent.

        Returns:
            None if the reply is no longer kept: it needs no acknowledgement, or has had one.

        Raises:
            RequestError: 404 as for `find`, or 409 if the round has no reply yet.
        """
        try:
            round_ = self.find(round_id)
        except RequestError as error:
            if error.status == 410:
                return None
            raise
        if not round_.reply.done():
            raise RequestError(409, "round_id", f"round {round_id} has no reply yet")
        round_.acknowledged = True
        self._trim()
        return round_

    def _trim(self) -> None:
        """Remove replies beyond the last few of their run or of 1,024 other runs; beyond the memory, the oldest of all.

        Replies that no connection has received are removed last; the newest one stays. Protected ones count towards a
        separate limit.
        """
        newer: dict[str, int] = {}
        rest: list[RoundRecord] = []
        for round_ in reversed(list(self._kept.values())):
            count = newer[round_.run] = newer.get(round_.run, 0) + 1
            if not round_.protected:
                rest.append(round_)
                if count > self._per_run or len(newer) > MAX_RUNS:
                    self._remove(rest.pop())
        total = sum(round_.reply.result().nbytes for round_ in rest)
        for round_ in sorted(rest[:0:-1], key=lambda r: not r.reply.result().received):
            if total <= self._capacity:
                break
            total -= round_.reply.result().nbytes
            self._remove(round_)

    def _remove(self, round_: RoundRecord) -> None:
        del self._kept[round_.id], self._rounds[round_.id]
        self._bytes -= round_.reply.result().nbytes
        self._forget(round_.id)
        self._deleted(round_.id)

    def _forget(self, round_id: str, failure: RequestError | None = None) -> None:
        error = failure or RequestError(410, "round_id", f"the reply of round {round_id} is no longer kept")
        self._gone[round_id] = error.status, error.field, error.reason
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)


def _future() -> "asyncio.Future[Any]":
    """A future whose exception may stay unread, because every waiting client may have disconnected."""
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
