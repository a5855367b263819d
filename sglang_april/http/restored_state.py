"""The HTTP process after a restart: what the journal restores (`restart-loses-nothing`), and journal faults."""

import asyncio
import logging
from typing import Any

from sglang_april.api import messages
from sglang_april.http.completed_groups import CompletedGroups, GroupSlice
from sglang_april.http.frontend import Frontend
from sglang_april.http.reply import Reply
from sglang_april.http.rounds import RoundRecord, RoundRegistry
from sglang_april.http.trajectories import TrajectoryRecord, TrajectoryRecords
from sglang_april.http.weight_lock import WeightLock

logger = logging.getLogger("sglang_april")


class RestoredState:
    """With a journal, the scheduler's first message restores this process's state; requests wait for it."""

    def __init__(
        self,
        engine: Frontend,
        journal: str | None,
        groups: CompletedGroups,
        rounds: RoundRegistry,
        lock: WeightLock,
        trajectories: TrajectoryRecords,
    ) -> None:
        self._engine = engine
        self._journal = journal
        self._groups = groups
        self._rounds = rounds
        self._lock = lock
        self._trajectories = trajectories
        self._complete = asyncio.Event()
        self._replay: asyncio.Task[None] | None = None
        self.fault = ""
        """Why the journal cannot be written, or empty. While it is set, no new request is accepted."""
        self._warnings: list[str] = []

    async def ready(self) -> None:
        """Wait until everything is restored."""
        if self._journal is not None and not self._complete.is_set():
            self._engine.listen()
            await self._complete.wait()

    def state(self) -> dict[str, Any] | None:
        """The journal's part of `GET /april/state`; None without a journal."""
        if self._journal is None:
            return None
        return {"path": self._journal, "fault": self.fault, "warnings": self._warnings}

    def receive(self, message: messages.Restored | messages.Named | messages.JournalFault) -> None:
        """Handle a message about the journal or the restart."""
        match message:
            case messages.JournalFault():
                self.fault = message.reason
            case messages.Named():
                self._lock.unblock("unnamed", self._rounds.open_ids())
            case messages.Restored():
                self._restore(message)

    def _restore(self, message: messages.Restored) -> None:
        self._warnings = message.warnings
        for warning in message.warnings:
            logger.warning("%s", warning)
        for run, prompt in message.groups:
            self._groups.add_prompts(run, [prompt])
        for spec in message.rounds:
            self._rounds.reopen(RoundRecord(spec))
        self._rounds.add_finished(self._groups, message.finished)
        self._trajectories.restore(message.trajectories)
        self._preview_unjudged(message)
        self._rounds.mark_gone(message.gone)
        self._lock.block("unnamed")
        if not message.unnamed:
            self._lock.unblock("unnamed", self._rounds.open_ids())
        self._replay = asyncio.ensure_future(self._restore_replies(message.replies))

    def _preview_unjudged(self, message: messages.Restored) -> None:
        """Reopened rounds with `count: accepted` stream every whole group without a verdict."""
        for round_ in (r for r in self._rounds.open if r.spec.judged):
            shown = {part.prompt.id for part in round_.events}
            ids = [prompt_id for run, prompt_id in message.unjudged if run == round_.run and prompt_id not in shown]
            round_.events += self._groups.whole(round_.run, ids)

    async def _restore_replies(self, replies: list[messages.KeptReply]) -> None:
        """Build the kept replies again, the oldest first. Their texts are decoded again."""
        for kept in replies:
            try:
                parts = self._parts(kept)
                reply = await Reply.build(kept.ended, parts, _records(kept) if kept.spec.trajectories else None)
            except Exception:
                logger.exception("the reply of round %s is lost", kept.spec.round_id)
                self._rounds.mark_gone([kept.spec.round_id])
                continue
            round_ = RoundRecord(kept.spec, acknowledged=kept.acknowledged)
            self._rounds.restore_reply(round_, reply)
        self._complete.set()

    def _parts(self, kept: messages.KeptReply) -> list[GroupSlice]:
        by_key = {(s.id, s.incarnation, s.index): s for s in kept.samples}
        parts = []
        for delivery, prompt in zip(kept.ended.deliver, kept.prompts, strict=True):
            of_group = [by_key[delivery.id, delivery.incarnation, index] for index in delivery.indices]
            done = tuple(self._groups.completed(prompt, sample) for sample in of_group)
            parts.append(GroupSlice(prompt, delivery.incarnation, done, delivery.complete, delivery.accepted))
        return parts


def _records(kept: messages.KeptReply) -> list[TrajectoryRecord]:
    records = TrajectoryRecords()
    records.restore(kept.trajectories)
    return records.take(kept.spec.run, kept.ended.trajectories)
