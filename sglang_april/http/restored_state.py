"""After a restart: what the HTTP process restores, and whether the journal is writable (`restart-loses-nothing`)."""

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from sglang_april.api import messages
from sglang_april.http.completed_groups import CompletedSample, GroupSlice, PromptRecord
from sglang_april.http.reply import Reply
from sglang_april.http.rounds import RoundRecord

if TYPE_CHECKING:
    from sglang_april.http.service import AprilService

logger = logging.getLogger("sglang_april")


class RestoredState:
    """With a journal, the scheduler's first message says what the last server knew. Requests wait until it is told."""

    def __init__(self, april: "AprilService", journal: str | None) -> None:
        self._april = april
        self._journal = journal
        self._told = asyncio.Event()
        self.fault = ""
        """Why the journal cannot be written, or empty. Nothing new is accepted meanwhile."""
        self._warnings: list[str] = []

    async def ready(self) -> None:
        """Wait until everything is known again."""
        if self._journal is not None and not self._told.is_set():
            self._april.engine.listen()
            await self._told.wait()

    def state(self) -> dict[str, Any] | None:
        """For `GET /april/state`."""
        if self._journal is None:
            return None
        return {"path": self._journal, "fault": self.fault, "warnings": self._warnings}

    def receive(self, message: messages.Restored | messages.Named | messages.JournalFault) -> None:
        """What the scheduler says of the journal and the restart."""
        match message:
            case messages.JournalFault():
                self.fault = message.reason
            case messages.Named():
                self._april.retake("restart")
            case messages.Restored():
                self._restored(message)

    def _restored(self, message: messages.Restored) -> None:
        april = self._april
        self._warnings = message.warnings
        for warning in message.warnings:
            logger.warning("%s", warning)
        april.vault.accept(PromptRecord.of(run, prompt) for run, prompt in message.groups)
        for run, name, _ in message.verdicts:
            april.vault.judge(run, [name])
        for spec in message.rounds:
            round_ = RoundRecord(spec)
            round_.verdicts = {name: accepted for run, name, accepted in message.verdicts if run == spec.run}
            april.rounds.reopened(round_)
        april.finished(message.finished)
        for round_ in (r for r in april.rounds.open if r.spec.judged):
            shown = {part.prompt.id for part in round_.events}
            round_.events += [part for part in april.vault.unjudged(round_.run) if part.prompt.id not in shown]
        april.rounds.forgotten(message.gone)
        april.holds.keep_off("restart")
        if not message.unnamed:
            april.retake("restart")
        april.spawn(self._replay(message))

    async def _replay(self, message: messages.Restored) -> None:
        """Replies from the oldest to the newest, as they are kept. Their texts are decoded again."""
        for kept in message.replies:
            try:
                parts = self._parts(kept)
                reply = await Reply.build(kept.ended, parts)
            except Exception:
                logger.exception("the reply of round %s is lost", kept.spec.round_id)
                self._april.rounds.forgotten([kept.spec.round_id])
                continue
            round_ = RoundRecord(kept.spec)
            round_.events = list(parts)
            self._april.rounds.restored(round_, reply)
        self._told.set()

    def _parts(self, kept: messages.KeptReply) -> list[GroupSlice]:
        by_key = {(s.id, s.incarnation, s.index): s for s in kept.samples}
        parts = []
        for delivery, asked in zip(kept.ended.deliver, kept.prompts, strict=True):
            prompt = PromptRecord.of(kept.ended.run, asked)
            of_group = [by_key[delivery.id, delivery.incarnation, index] for index in delivery.indices]
            done = tuple(CompletedSample(sample, self._april.decode(prompt, sample)) for sample in of_group)
            parts.append(GroupSlice(prompt, delivery.incarnation, done, delivery.complete, delivery.accepted))
        return parts
