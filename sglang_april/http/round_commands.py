"""What callers do to a round: stop, judge, extend, acknowledge."""

import asyncio
import contextlib
from typing import Any

from sglang_april.api import messages, requests
from sglang_april.api.errors import RequestError
from sglang_april.http.background import Background
from sglang_april.http.completed_groups import CompletedGroups
from sglang_april.http.frontend import Frontend
from sglang_april.http.prepare import extend_round
from sglang_april.http.rounds import RoundRecord, RoundRegistry
from sglang_april.http.scheduler_rpc import SchedulerRpc


class RoundCommands:
    """Calls the scheduler for rounds of the registry, and keeps answers for repeated calls (`idempotent-round`)."""

    def __init__(
        self,
        engine: Frontend,
        rpc: SchedulerRpc,
        rounds: RoundRegistry,
        completed_groups: CompletedGroups,
        background: Background,
        *,
        journal: bool,
    ) -> None:
        self._engine, self._rpc, self._rounds = engine, rpc, rounds
        self._completed_groups, self._background, self._journal = completed_groups, background, journal

    async def stop(self, round_id: str, deliver: list[str] | None) -> dict[str, Any]:
        """End a round now, with what has finished; idempotent."""
        round_ = self._rounds.find(round_id)
        if round_.state == "opening":
            self._background.start(self._stop_after_opening(round_, deliver))
        elif round_.state == "open":
            try:
                await self._rpc.call(messages.StopRound(self._rpc.number(), round_id, deliver))
            except RequestError:
                if round_.state != "ended":
                    raise
        return {"round_id": round_id, "state": round_.state}

    async def judge(self, round_id: str, accept: list[str], reject: list[str]) -> dict[str, Any]:
        """Accept and reject finished groups of a round with `count: accepted`; idempotent, also after its end.

        A verdict that comes after the end changes nothing, and its id is `late` in the answer.

        Raises:
            RequestError: as for `RoundRegistry.find`; 404 or 409 from the scheduler (`Ledger.judge`); 409 for a verdict
                that contradicts one of the ended round.
        """
        round_ = self._rounds.find(round_id)
        await asyncio.shield(round_.opened)
        command = messages.JudgeRound(self._rpc.number(), round_id, accept, reject)
        late: list[str] = []
        try:
            counts = (await self._rpc.call(command)).data
        except RequestError as error:
            if not round_.spec.judged or (error.status, error.field) != (409, "round_id"):
                raise
            verdicts = (await asyncio.shield(round_.reply)).verdicts
            if any(verdicts.get(i) is False for i in accept) or any(verdicts.get(i) is True for i in reject):
                raise
            late = [name for name in (*accept, *reject) if name not in verdicts]
            counts = messages.count_verdicts(verdicts.values())
        return {"round_id": round_id, **counts, "late": late}

    async def extend(self, round_id: str, body: requests.ExtendBody, fingerprint: str) -> dict[str, Any]:
        """Raise the quota of an open round and add prompts; idempotent with a key, also after the round's end.

        Raises:
            RequestError: as for `RoundRegistry.find`; 409, the key was used with another body; or a refusal.
        """
        round_, key = self._rounds.find(round_id), body.idempotency_key
        if key is None:
            return await self._extend(round_, body, fingerprint)
        if key not in round_.extensions:
            work = asyncio.ensure_future(self._extend(round_, body, fingerprint))
            work.add_done_callback(lambda done: done.cancelled() or (done.exception() and round_.extensions.pop(key)))
            round_.extensions[key] = fingerprint, work
        known, answer = round_.extensions[key]
        if known != fingerprint:
            raise RequestError(409, "idempotency_key", f"{key!r} was used with another body")
        return await asyncio.shield(answer)

    async def _extend(self, round_: RoundRecord, body: requests.ExtendBody, fingerprint: str) -> dict[str, Any]:
        await asyncio.shield(round_.opened)
        number = self._rpc.number()
        command = await self._background.in_thread(extend_round, number, round_.spec, body, fingerprint, self._engine)
        try:
            answer = await self._rpc.call(
                command, accepted=lambda _: self._completed_groups.add_prompts(round_.run, command.prompts)
            )
        except RequestError as error:
            if error.unjournalled:
                await self.undo(round_, command.prompts, accepted=True)
            raise
        return {"round_id": round_.id, **answer.data}

    async def acknowledge(self, round_id: str) -> dict[str, Any]:
        """Acknowledge a reply that the caller has stored."""
        round_ = self._rounds.acknowledge(round_id)
        if round_ is not None and self._journal:
            await self._rpc.call(messages.Acknowledge(self._rpc.number(), round_id))
        return {"round_id": round_id, "acknowledged": True}

    async def undo(self, round_: RoundRecord, prompts: list[messages.Prompt], *, accepted: bool) -> None:
        """Delete prompts that could not be journalled, and end their round: if it was `accepted`, with its reply."""
        round_id = "" if accepted else round_.id
        with contextlib.suppress(RequestError):  # the first error is the one to report
            await self._rpc.call(messages.Drop(self._rpc.number(), round_.run, [p.id for p in prompts], round_id))
            if accepted:
                await self.stop(round_.id, None)

    async def _stop_after_opening(self, round_: RoundRecord, deliver: list[str] | None) -> None:
        with contextlib.suppress(RequestError):
            await asyncio.shield(round_.opened)
            await self.stop(round_.id, deliver)
