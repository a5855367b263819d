"""Steps 1 and 6: the service behind the routes; `engine.tokenizer_manager.april` for SGLang started in code."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from sglang_april.api import messages, requests
from sglang_april.api.errors import RequestError, fault
from sglang_april.config import AprilConfig
from sglang_april.http.completed_groups import CompletedGroups, GroupSlice, PromptRecord, visible_text
from sglang_april.http.frontend import Frontend
from sglang_april.http.prepare import extend_round, open_round, round_spec
from sglang_april.http.reply import Reply, log_reply
from sglang_april.http.restored_state import RestoredState
from sglang_april.http.rounds import RoundRecord, RoundRegistry
from sglang_april.http.scheduler_rpc import SchedulerRpc
from sglang_april.http.validation import check_rollout
from sglang_april.http.weight_lock import WeightLock

logger = logging.getLogger("sglang_april")

OnReply = Callable[[Reply], None]


class AprilService:
    """Rounds, pushes and their bookkeeping on one event loop; the scheduler decides, this side carries and tells."""

    def __init__(self, engine: Frontend, config: AprilConfig, on_reply: OnReply | None = None) -> None:
        self.engine = engine
        self.config = config
        self.link = SchedulerRpc(engine.send)
        self.holds = WeightLock(engine.lock)
        self.vault = CompletedGroups(self.decode)
        self.rounds = RoundRegistry(config.replies, config.reply_bytes)
        self.hook_report: dict[str, Any] = {}
        self.released: set[str] = set()
        """Memory tags that are released at this moment."""
        self.pausing = asyncio.Lock()
        """A pause and its end, one at a time."""
        self.restart = RestoredState(self, config.journal)
        self.broken = ""
        """Why the scheduler serves no rounds any more, or empty."""
        self._on_reply = on_reply
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="april")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pushing = asyncio.Lock()

    # What the routes call

    async def rollout(self, request: dict[str, Any]) -> dict[str, Any]:
        """`POST /april/rollout` for callers in this process: a round from request to reply, arrays as raw bytes."""
        body = requests.decode_rollout(msgspec.msgpack.encode(request), True)
        round_ = await self.open(body, check_rollout(body, packed=True))
        reply = await asyncio.shield(round_.reply)
        return msgspec.msgpack.decode(reply.encode(packed=True))

    async def open(self, body: requests.RolloutBody, fingerprint: str) -> RoundRecord:
        """Open the round that a request asks for, or find it; it lives on when the caller goes away."""
        await self.restart.ready()
        if (reason := self.broken or self.restart.fault) and not self.rounds.knows(body.round_id):
            raise RequestError(503, "", reason)
        spec = round_spec(body, body.round_id or uuid.uuid4().hex, fingerprint, self.config)
        round_, new = self.rounds.admit(RoundRecord(spec))
        if new:
            self.spawn(self._open(round_, body))
        await asyncio.shield(round_.opened)
        return round_

    async def stop(self, round_id: str, deliver: list[str] | None) -> dict[str, Any]:
        """End a round now, with what has finished; idempotent."""
        round_ = self.rounds.find(round_id)
        if round_.state == "opening":
            self.spawn(self._stop_once_open(round_, deliver))
        elif round_.state == "open":
            try:
                await self.link.call(messages.StopRound(self.link.number(), round_id, deliver))
            except RequestError:
                if round_.state != "ended":
                    raise
        return {"round_id": round_id, "state": round_.state}

    async def judge(self, round_id: str, accept: list[str], reject: list[str]) -> dict[str, Any]:
        """Accept and reject finished groups of a round with `count: accepted`; idempotent, also after its end."""
        round_ = self.rounds.find(round_id)
        await asyncio.shield(round_.opened)
        command = messages.JudgeRound(self.link.number(), round_id, accept, reject)
        try:
            await self.link.call(command, accepted=lambda _: self._judged(round_, accept, reject))
        except RequestError:
            if not round_.repeats(accept, reject):
                raise
        verdicts = list(round_.verdicts.values())
        return {"round_id": round_id, "accepted": verdicts.count(True), "rejected": verdicts.count(False)}

    def _judged(self, round_: RoundRecord, accept: list[str], reject: list[str]) -> None:
        round_.verdicts |= dict.fromkeys(accept, True) | dict.fromkeys(reject, False)
        self.vault.judge(round_.run, [*accept, *reject])

    async def extend(self, round_id: str, body: requests.ExtendBody) -> dict[str, Any]:
        """A greater quota and more prompts for an open round."""
        round_ = self.rounds.find(round_id)
        await asyncio.shield(round_.opened)
        number = self.link.number()
        command, prompts = await self._in_thread(extend_round, number, round_.spec, body, self.engine)
        answer = await self.link.call(command, accepted=lambda _: self.vault.accept(prompts))
        return {"round_id": round_id, **answer.data}

    async def acknowledge(self, round_id: str) -> dict[str, Any]:
        """The caller has the reply for good."""
        round_ = self.rounds.acknowledge(round_id)
        if self.config.journal is not None:
            await self.link.call(messages.Acknowledge(self.link.number(), round_.id, round_.run))
        return {"round_id": round_.id, "acknowledged": True}

    async def drop(self, run: str, ids: list[str] | None) -> dict[str, Any]:
        """Delete undelivered groups of a run, in the scheduler and here."""
        command = messages.Drop(self.link.number(), run, ids)
        answer = await self.link.call(command, accepted=lambda _: self.vault.drop(run, ids))
        return {"run": run, **answer.data}

    async def push_begin(self, version: int | None) -> dict[str, Any]:
        """Suspend our samples in the scheduler, then let weight calls pass our open rounds."""
        async with self._pushing:
            answer = await self.link.call(messages.PushBegin(self.link.number(), version))
            await self.holds.give_up("push")
        return {"push_open": True, **answer.data}

    async def push_end(self, version: int | None) -> dict[str, Any]:
        """The policy is complete: the version moves and open rounds go on."""
        async with self._pushing:
            answer = await self.link.call(messages.PushEnd(self.link.number(), version))
            self.retake("push")
        return {"push_open": False, **answer.data}

    async def freeze(self) -> None:
        """A pause begins: nothing of ours takes a step, and nothing of ours keeps the pause waiting."""
        await self.link.call(messages.Freeze(self.link.number()))
        await self.holds.give_up("pause")

    async def thaw(self) -> None:
        """The pause is over."""
        await self.link.call(messages.Thaw(self.link.number()))
        self.retake("pause")

    async def state(self, *, check: bool = False) -> dict[str, Any]:
        """What the scheduler and this process know of themselves; `check`: and whether every stored page is sound."""
        answer = await self.link.call(messages.GetState(self.link.number()))
        if check:
            found = await self.link.call(messages.GetState(self.link.number(), check=True))
            answer.data["check"] = found.data
        http = {
            "rounds": {round_.id: {"run": round_.run, "state": round_.state} for round_ in self.rounds.open},
            "kept_replies": self.rounds.kept,
            "kept_reply_bytes": self.rounds.kept_bytes,
            "undelivered_groups": len(self.vault),
            "finished_samples": self.vault.samples,
            "held_locks": len(self.holds.held),
            "hooks": self.hook_report,
            "model": self.engine.facts().model,
            "journal": self.restart.state(),
        }
        return {**answer.data, "http": http}

    async def partials(self, run: str | None) -> dict[str, Any]:
        """The suspended samples of a run, or of all."""
        return (await self.link.call(messages.GetPartials(self.link.number(), run))).data

    # What the scheduler says

    def receive(self, payload: bytes) -> None:
        """One message of the scheduler. Messages are handled whole and in order, so no await may be in here.

        An exception would end SGLang's loop, and the server with it.
        """
        try:
            message = messages.decode_event(payload)
            if isinstance(message, messages.Answer):
                self.link.answered(message)
            elif isinstance(message, messages.Finished):
                self.finished(message.samples)
            elif isinstance(message, messages.RoundEnded):
                self._ended(message)
            elif isinstance(message, messages.Broken):
                self._broken(message.reason)
            else:
                self.restart.receive(message)
        except Exception:
            logger.exception("a message of the scheduler could not be handled")

    def finished(self, samples: list[messages.FinishedSample]) -> None:
        """Samples that have ended, in that order."""
        rung = set()
        of_id = {round_.id: round_ for round_ in self.rounds.open}
        for sample in samples:
            group = self.vault.put(sample)
            round_ = of_id.get(sample.round_id or "")
            if group is None:
                logger.warning("a sample of %r finished, which this process does not know", sample.id)
            elif round_ is not None and round_.spec.quota_unit == "sample" and not round_.spec.judged:
                round_.events.append(group.part(sample.whole, [sample.index]))
                rung.add(round_)
            elif round_ is not None and sample.whole:
                round_.events.append(group.part(complete=True))
                rung.add(round_)
        for round_ in rung:
            round_.ring()

    def _ended(self, message: messages.RoundEnded) -> None:
        round_ = next((r for r in self.rounds.open if r.id == message.round_id), None)
        if round_ is None:
            logger.error("the scheduler ended round %s, which is not open here", message.round_id)
            return
        self.rounds.ended(round_)
        try:
            parts = self.vault.deliver(message.run, message.deliver)
        except Exception as error:  # whatever is wrong, nobody waits for a reply that will not come
            logger.exception("round %s has no reply", round_.id)
            self.rounds.failed(round_, fault(error))
            self.spawn(self.holds.drop(round_.id))
            return
        streamed = {key for part in round_.events for key in part.keys}
        round_.events += [rest for part in parts if (rest := part.without(streamed)).done]
        round_.ring()
        self.spawn(self._reply(round_, message, parts))

    def _broken(self, reason: str) -> None:
        """No reply will come for what is open: those who wait are told, and weight calls wait no longer for it."""
        self.broken = reason
        for round_ in [r for r in self.rounds.open if r.state == "open"]:
            self.rounds.ended(round_)
            self.rounds.failed(round_, RequestError(500, "server", reason))
            self.spawn(self.holds.drop(round_.id))

    # What runs beside the callers

    async def _open(self, round_: RoundRecord, body: requests.RolloutBody) -> None:
        """Prepare, become a reader of the weights, and ask the scheduler; or refuse and leave no trace."""
        try:
            number = self.link.number()
            command, prompts = await self._in_thread(open_round, number, round_.spec, body, self.config, self.engine)
            await self.holds.take(round_.id)
            await self.link.call(command, accepted=lambda _: self._accepted(round_, prompts))
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("round %s could not be opened", round_.id)
            await self.holds.drop(round_.id)
            self.rounds.refuse(round_, error if isinstance(error, RequestError) else fault(error))

    def _accepted(self, round_: RoundRecord, prompts: list[PromptRecord]) -> None:
        self.vault.accept(prompts)
        if round_.spec.judged:
            round_.events += self.vault.unjudged(round_.run)
        self.rounds.opened(round_)
        self.holds.fill([round_.id])  # a push or pause that ended while it opened has passed it over
        if self.broken:  # with a journal this answer may come after that
            self._broken(self.broken)

    async def _stop_once_open(self, round_: RoundRecord, deliver: list[str] | None) -> None:
        with contextlib.suppress(RequestError):
            await asyncio.shield(round_.opened)
            await self.stop(round_.id, deliver)

    async def _reply(self, round_: RoundRecord, message: messages.RoundEnded, parts: list[GroupSlice]) -> None:
        try:
            await self.holds.drop(round_.id)
            await self.restart.ready()  # older replies are kept first, or this one would make room for them
            reply = await Reply.build(message, parts)
        except (Exception, asyncio.CancelledError) as error:  # however it ends, those who wait must hear of it
            logger.exception("round %s has no reply", round_.id)
            self.rounds.failed(round_, fault(error))
            return
        if reply.stats.get("t_quota_met") is not None:
            reply.stats["quota_to_built_s"] = max(0.0, time.time() - reply.stats["t_quota_met"])
        self.rounds.keep(round_, reply)
        log_reply(reply)
        if self._on_reply is not None:
            self._on_reply(reply)

    def decode(self, prompt: PromptRecord, sample: messages.FinishedSample) -> "asyncio.Future[str | None]":
        return asyncio.get_running_loop().run_in_executor(self._threads, self._text, prompt, sample)

    def _text(self, prompt: PromptRecord, sample: messages.FinishedSample) -> str | None:
        try:
            return visible_text(self.engine.decode, prompt, sample)
        except Exception:
            logger.exception("sample %d of prompt %r could not be decoded", sample.index, sample.id)
            return None

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def retake(self, reason: str) -> None:
        self.holds.retake(reason, [round_.id for round_ in self.rounds.open if round_.state == "open"])

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
