"""The service behind the routes."""

import asyncio
import contextlib
import logging
import time
import uuid
from typing import Any, TypeVar

import msgspec

from sglang_april.api import messages, requests
from sglang_april.api.errors import JOURNAL, SHUTDOWN, RequestError, fault
from sglang_april.config import AprilConfig
from sglang_april.http.attached import AttachedRequests
from sglang_april.http.audit import Audit
from sglang_april.http.background import Background
from sglang_april.http.bodies import off_loop
from sglang_april.http.completed_groups import CompletedGroups, GroupSlice, visible_text
from sglang_april.http.frontend import Frontend
from sglang_april.http.prepare import open_round, round_spec
from sglang_april.http.pushes import Pushes
from sglang_april.http.reply import Reply, log_reply
from sglang_april.http.restored_state import RestoredState
from sglang_april.http.round_commands import RoundCommands
from sglang_april.http.rounds import RoundRecord, RoundRegistry
from sglang_april.http.scheduler_rpc import SchedulerRpc
from sglang_april.http.trajectories import TrajectoryRecord, TrajectoryRecords
from sglang_april.http.weight_lock import WeightLock
from sglang_april.metrics import Metrics

logger = logging.getLogger("sglang_april")

T = TypeVar("T")
JOURNAL_PATIENCE_S = 10.0
"""A client whose answer waits for the journal learns the reason after this time at the latest."""


class AprilService:
    """Rounds, pushes and replies on the event loop of the HTTP process; every decision is the scheduler's."""

    def __init__(self, engine: Frontend, config: AprilConfig, metrics: Metrics | None = None) -> None:
        self.engine = engine
        self.config = config
        self.metrics = metrics or Metrics()
        self.rpc = SchedulerRpc(engine.send)
        self.audit = Audit(engine, self.rpc, config, self.metrics.audited)
        self.weight_lock = WeightLock(engine.lock)
        self.completed_groups = CompletedGroups(self._decode)
        self.rounds = RoundRegistry(config.replies, config.reply_bytes, self._reply_deleted)
        self.hook_report: dict[str, Any] = {}
        self.attached = AttachedRequests(lambda: self.restored_state.fault)
        self.trajectories = TrajectoryRecords()
        self.released: set[str] = set()
        """SGLang's tags of memory that is released now."""
        self.pushes = Pushes(self.rpc, self.weight_lock, self.rounds, self.audit, self.metrics.pushed)
        self.restored_state = RestoredState(
            engine, config.journal, self.completed_groups, self.rounds, self.weight_lock, self.trajectories
        )
        self.closing = ""
        """Why the server is about to end, or empty."""
        self._background = Background()
        self.round_commands = RoundCommands(
            engine, self.rpc, self.rounds, self.completed_groups, self._background, journal=config.journal is not None
        )

    # --- called by the routes

    def check_size(self, size: int) -> None:
        """Refuse a body beyond `--april-max-body-mb` before it is decoded.

        Raises:
            RequestError: 413.
        """
        if size > self.config.max_body_bytes:
            limit = f"more than the {self.config.max_body_mb} MiB of --april-max-body-mb"
            raise RequestError(413, "body", f"has {size} bytes or more, {limit}")

    async def open(self, body: requests.RolloutBody, fingerprint: str) -> RoundRecord:
        """Open the round that a request asks for, or find it (`idempotent-round`).

        Raises:
            RequestError: 503 if no round may open; as for `RoundRegistry.admit`; or the request cannot be served.
        """
        await self.restored_state.ready()
        if not self.rounds.contains(body.round_id):
            self._check_accepts_rounds()
        spec = round_spec(body, body.round_id or uuid.uuid4().hex, fingerprint, self.config)
        round_, new = self.rounds.admit(RoundRecord(spec))
        if new:
            self._background.start(self._open(round_, body))
        await self.wait(round_, round_.opened)
        return round_

    def _check_accepts_rounds(self) -> None:
        reasons = {SHUTDOWN: self.closing, "": self.restored_state.fault, "audit": self.audit.refusal}
        for field, reason in reasons.items():
            if reason:
                raise RequestError(503, field, reason)

    async def wait(self, round_: RoundRecord, answer: "asyncio.Future[T]") -> T:
        """Wait for `opened` or `reply` of a round, which a cancelled call does not end.

        Raises:
            RequestError: 503 while the journal cannot be written. The round continues: the same request finds it.
        """
        while not (await asyncio.wait((answer,), timeout=JOURNAL_PATIENCE_S))[0]:
            if reason := self.restored_state.fault:
                reason = f"{reason}; round {round_.id} waits for it: repeat the request with this round_id"
                raise RequestError(503, JOURNAL, reason)
        return answer.result()

    def _reply_deleted(self, round_id: str) -> None:
        """The journal keeps the replies that this process keeps. After a crash before that, this is decided again."""
        if self.config.journal is not None:
            self._background.start(self.rpc.call(messages.DeleteReply(self.rpc.number(), round_id)))

    async def drop(self, run: str, ids: list[str] | None) -> dict[str, Any]:
        """Delete undelivered groups of a run."""
        command = messages.Drop(self.rpc.number(), run, ids)
        answer = await self.rpc.call(command, accepted=lambda answer: self._dropped(run, answer))
        return {"run": run, **answer.data}

    def _dropped(self, run: str, answer: messages.Answer) -> None:
        self.completed_groups.remove(run, [prompt_id for prompt_id, _incarnation in answer.data["groups"]])

    async def end_trajectories(self, run: str, body: requests.EndBody) -> dict[str, Any]:
        """Trajectories are done, or rejected; idempotent."""
        results = {name: msgspec.msgpack.encode(result) for name, result in body.trajectories.items()}
        command = messages.EndTrajectories(self.rpc.number(), run, results, body.reject)

        def ended(answer: messages.Answer) -> None:
            for name, group in answer.data.pop("new").items():
                self.trajectories.done(run, name, group, body.trajectories[name], len(results[name]))

        answer = await self.rpc.call(command, accepted=ended)
        return {"run": run, **answer.data}

    async def trajectory(self, run: str, name: str, packed: bool) -> dict[str, Any]:
        """The state and the record of an undelivered trajectory."""
        state = (await self.rpc.call(messages.GetTrajectory(self.rpc.number(), run, name))).data
        record = self.trajectories.get(run, name) or TrajectoryRecord(run, name, state["group"])
        fields = await off_loop(record.nbytes, record.fields, packed)  # compares all branches
        return {**fields, **{name: state[name] for name in ("state", "staleness", "tokens")}}

    async def check(self) -> dict[str, Any]:
        """Whether every stored page verifies on every rank, and the pool accounting: `ok` and `problem`."""
        return (await self.rpc.call(messages.GetState(self.rpc.number(), check=True))).data

    async def state(self) -> dict[str, Any]:
        """The state of the scheduler and of this process."""
        answer = await self.rpc.call(messages.GetState(self.rpc.number()))
        http = {
            "rounds": {round_.id: {"run": round_.run, "state": round_.state} for round_ in self.rounds.open},
            "last_rounds": list(self.metrics.last_rounds),
            "kept_replies": self.rounds.kept,
            "kept_reply_bytes": self.rounds.kept_bytes,
            "undelivered_groups": len(self.completed_groups),
            "finished_samples": self.completed_groups.samples,
            "held_locks": len(self.weight_lock.held),
            "hooks": self.hook_report,
            "model": self.engine.server_info().model,
            "journal": self.restored_state.state(),
        }
        return {**answer.data, "audit": self.audit.state(), "http": http}

    async def released_memory(self) -> list[str]:
        """SGLang's tags of memory that the scheduler has released.

        If the weights are lost, a weight call must not wait for a round that waits for it.
        """
        brief = (await self.rpc.call(messages.GetState(self.rpc.number(), brief=True))).data
        if brief["unnamed"]:
            await self.weight_lock.release_all("unnamed")
        return list(brief["released"])

    async def partials(self, run: str | None) -> dict[str, Any]:
        """The suspended samples of a run, or of all."""
        return (await self.rpc.call(messages.GetPartials(self.rpc.number(), run))).data

    # --- events of the scheduler

    def receive(self, payload: bytes) -> None:
        """Handle one message of the scheduler completely and in order; this method must not await.

        An exception ends SGLang's loop, and with it the server (`fail-stop`): some client would wait forever.
        """
        message = messages.decode_event(payload)
        if isinstance(message, messages.Answer):
            self.rpc.answered(message)
        elif isinstance(message, messages.Finished):
            self.rounds.add_finished(self.completed_groups, message.samples)
            for sample in message.samples:
                if (prompt := self.completed_groups.prompt_of(sample)) is not None:
                    self.audit.offer(sample, prompt)
        elif isinstance(message, messages.LegEnded):
            self.trajectories.add(message)
            self.attached.receive(messages.EndedRequest(message.rid, message.result.spans, message.policy_version))
            self.metrics.leg_ended(mismatch=message.mismatch)
        elif isinstance(message, messages.RoundWaits):
            self._background.start(self._end_after_waiting(message.round_id))
        elif isinstance(message, messages.TrajectoriesRemoved):
            self.trajectories.remove(message.run, message.ids)
        elif isinstance(message, messages.AttachedEnded):
            for request in message.requests:
                if request.drawn is None:
                    self.attached.receive(request)
                else:  # it has finished, so its answer or its record tells the rest
                    prompt, sample = request.drawn
                    self.audit.offer(sample, prompt)
        elif isinstance(message, messages.RoundEnded):
            self._round_ended(message)
        else:
            self.restored_state.receive(message)

    def _round_ended(self, message: messages.RoundEnded) -> None:
        round_ = next((r for r in self.rounds.open if r.id == message.round_id), None)
        if round_ is None:
            logger.error("the scheduler ended round %s, which is not open here", message.round_id)
            return
        self.rounds.mark_ended(round_)
        self.trajectories.remove(message.run, message.rejected)
        records = self.trajectories.take(message.run, message.trajectories) if round_.spec.trajectories else None
        try:
            parts = self.completed_groups.take(message.run, message.deliver)
            if message.error:
                raise RequestError(500, JOURNAL, message.error)
        except Exception as error:  # after any fault, no client may wait for a reply that will not come
            logger.exception("round %s has no reply", round_.id)
            self.rounds.fail(round_, error if isinstance(error, RequestError) else fault(error))
            self._background.start(self.weight_lock.release(round_.id))
            return
        self._background.start(self._reply(round_, message, parts, records))

    # --- background tasks

    async def _end_after_waiting(self, round_id: str) -> None:
        """`wait_s`: the scheduler has no clock that all ranks share."""
        round_ = next((r for r in self.rounds.open if r.id == round_id), None)
        if round_ is None or round_.spec.wait_s is None:
            return
        round_.waits += 1
        wait = round_.waits
        await asyncio.sleep(round_.spec.wait_s)
        if round_.state == "open" and round_.waits == wait:
            with contextlib.suppress(RequestError):
                await self.rpc.call(messages.StopRound(self.rpc.number(), round_id, waited=True))

    async def _open(self, round_: RoundRecord, body: requests.RolloutBody) -> None:
        """Prepare the command, become a reader of the weights and call the scheduler, or remove the round."""
        try:
            number = self.rpc.number()
            command = await self._background.in_thread(open_round, number, round_.spec, body, self.config, self.engine)
            if not round_.spec.trajectories:  # weight calls suspend legs, and wait for no agent
                await self.weight_lock.acquire(round_.id)
            await self.rpc.call(command, accepted=lambda answer: self._accepted(round_, command.prompts, answer))
        except Exception as error:
            if isinstance(error, RequestError) and error.unjournalled:
                await self.round_commands.undo(round_, command.prompts, accepted=False)
            if not isinstance(error, RequestError):
                logger.exception("round %s could not be opened", round_.id)
            await self.weight_lock.release(round_.id)
            self.rounds.refuse(round_, error if isinstance(error, RequestError) else fault(error))

    def _accepted(self, round_: RoundRecord, prompts: list[messages.Prompt], answer: messages.Answer) -> None:
        self.completed_groups.add_prompts(round_.run, prompts)
        round_.events += self.completed_groups.whole(round_.run, answer.data.get("unjudged", ()))
        self.rounds.mark_open(round_)
        self.weight_lock.acquire_missing(self.rounds.open_ids())  # if a push or pause ended while the round opened

    async def _reply(
        self,
        round_: RoundRecord,
        message: messages.RoundEnded,
        parts: list[GroupSlice],
        trajectories: list[TrajectoryRecord] | None,
    ) -> None:
        try:
            await self.weight_lock.release(round_.id)
            await self.restored_state.ready()  # older replies must be kept first: `_trim` removes by age
            reply = await Reply.build(message, parts, trajectories)
        except (Exception, asyncio.CancelledError) as error:  # every waiting client must get an answer
            logger.exception("round %s has no reply", round_.id)
            self.rounds.fail(round_, fault(error))
            return
        if reply.stats.get("t_quota_met") is not None:
            reply.stats["quota_to_built_s"] = max(0.0, time.time() - reply.stats["t_quota_met"])
        self.rounds.keep(round_, reply)
        log_reply(reply)
        self.metrics.observe(reply)

    def _decode(self, prompt: messages.Prompt, sample: messages.FinishedSample) -> "asyncio.Future[str | None]":
        return self._background.in_thread(self._text, prompt, sample)

    def _text(self, prompt: messages.Prompt, sample: messages.FinishedSample) -> str | None:
        try:
            return visible_text(self.engine.decode, prompt, sample)
        except Exception:
            logger.exception("sample %d of prompt %r could not be decoded", sample.index, sample.id)
            return None
