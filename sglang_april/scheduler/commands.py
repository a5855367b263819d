"""Execute the broadcast commands. A refused one changes nothing (`refusal-changes-nothing`)."""

from collections.abc import Callable
from typing import Any

from sglang_april.api import messages
from sglang_april.api.errors import SHUTDOWN, RequestError
from sglang_april.api.messages import Prompt
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.ledger import Forgotten
from sglang_april.scheduler.pushes import Interrupter
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.round_end import RoundEnd
from sglang_april.scheduler.round_opening import open_round
from sglang_april.scheduler.state import Group, State
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.trajectory_commands import TrajectoryCommands
from sglang_april.scheduler.trajectory_ends import TrajectoryEnds

MAX_QUOTA = 2**31 - 1


class Commands:
    def __init__(
        self,
        context: Context,
        suspender: Suspender,
        round_end: RoundEnd,
        pushes: Interrupter,
        tiers: Tiers,
        trajectory_ends: TrajectoryEnds,
    ) -> None:
        self._c = context
        self._suspender = suspender
        self._round_end = round_end
        self._pushes = pushes
        self._tiers = tiers
        self._trajectories = TrajectoryCommands(context, round_end, trajectory_ends)
        self._answered: dict[type, Callable[[Any], dict[str, Any] | None]] = {
            messages.OpenRound: self._open,
            messages.StopRound: self._stop,
            messages.JudgeRound: self._judge,
            messages.ExtendRound: self._extend,
            messages.Drop: self._drop,
            messages.EndTrajectories: self._trajectories.end,
            messages.GetTrajectory: self._trajectories.get,
            messages.GetState: self._report,
            messages.GetPartials: self._report,
        }

    def execute(self, cmd: messages.Command) -> dict[str, Any] | None:
        """Execute a command; returns the data of its answer, or None if the answer is sent later.

        Raises:
            RequestError: the command is refused.
        """
        if (answered := self._answered.get(type(cmd))) is not None:
            return answered(cmd)
        match cmd:
            case messages.Acknowledge() | messages.DeleteReply():
                self._note_reply(cmd)
            case messages.Shutdown():
                self._shut_down(store=cmd.store)
            case messages.PushBegin():
                self._pushes.begin(cmd.version)
            case messages.PushEnd():
                return self._pushes.end(cmd.version)
            case messages.Freeze() | messages.Thaw():
                (self._pushes.freeze if isinstance(cmd, messages.Freeze) else self._pushes.thaw)()
        return {}

    def _report(self, cmd: messages.GetState | messages.GetPartials) -> dict[str, Any] | None:
        if isinstance(cmd, messages.GetState):
            if cmd.check:
                self._tiers.integrity.begin(cmd.seq)
                return None
            if cmd.brief:
                return report.brief(self._c)
        self._c.count(self._c.ledger.samples(State.RUNNING))
        if isinstance(cmd, messages.GetPartials):
            return {"partials": report.partials(self._c, cmd.run), **report.groups(self._c, cmd.run)}
        return {**report.state(self._c), "store": report.store(self._c, self._tiers)}

    def _note_reply(self, cmd: messages.Acknowledge | messages.DeleteReply) -> None:
        recorder = self._c.recorder
        note = recorder.acknowledged if isinstance(cmd, messages.Acknowledge) else recorder.reply_deleted
        note(cmd.round_id)

    def _open(self, cmd: messages.OpenRound) -> dict[str, Any]:
        c = self._c
        if reason := c.closed():
            raise RequestError(503, SHUTDOWN if c.closing else "", reason)
        spec = cmd.spec
        if (known := c.rounds.get(spec.run_key)) is not None:
            raise RequestError(409, "run", f"round {known.spec.round_id!r} of run {spec.run!r} is still open")
        self._check_prompts(spec, cmd.prompts)
        run = c.run_of(spec)
        if isinstance(spec.concurrency, int):
            self._suspender.keep_within(run, spec.concurrency)
        run.rounds_opened += 1
        rnd = open_round(c, spec, run.rounds_opened)
        groups, forgotten = self._accept(rnd, cmd)
        c.recorder.accepted(spec, rnd.number, groups, forgotten)
        self._round_end.mark_due()
        unjudged = [g.id for g in run.groups.values() if g.whole and g.accepted is None] if spec.judged else []
        incarnations = [g.incarnation for g in groups]
        return {"incarnations": incarnations, "policy_version": c.clock.version, "unjudged": unjudged}

    def _check_prompts(self, spec: messages.RoundSpec, prompts: list[Prompt]) -> None:
        """Refuse new prompts while too much waits for delivery. A round without prompts only reduces it.

        Raises:
            RequestError: as for `Ledger.check`; 409 if the round is one of trajectories; 503.
        """
        if prompts and spec.trajectories:
            raise RequestError(409, "prompts", f"round {spec.round_id} is a round of trajectories, which has none")
        self._c.ledger.check(spec.run, prompts)
        if not prompts:
            return
        self._c.count(self._c.ledger.samples(State.RUNNING))
        tokens, cap = self._c.ledger.tokens(), self._c.carry_cap_tokens
        if tokens >= cap:
            reason = (
                f"{tokens} output tokens wait for delivery, and --april-carry-tokens {cap} is reached: "
                "a round without prompts delivers them, POST /april/drop deletes them"
            )
            raise RequestError(503, "prompts", reason)

    def _accept(
        self, rnd: Round, cmd: messages.OpenRound | messages.ExtendRound
    ) -> tuple[list[Group], list[Forgotten]]:
        """Add prompts that `_check_prompts` has passed; returns their groups, and what is forgotten because of them."""
        if rnd.spec.trajectories:  # its samples are requests of agents
            return [], []
        c, run = self._c, rnd.spec.run
        groups = c.ledger.accept(run, cmd.prompts, cmd.params)
        return groups, c.ledger.forget(run, c.rounds.keys() | c.ahead.keys())

    def _find(self, round_id: str) -> Round | None:
        """The open round of this id."""
        return next((r for r in self._c.rounds.values() if r.spec.round_id == round_id), None)

    def _judge(self, cmd: messages.JudgeRound) -> dict[str, Any]:
        """Take the verdicts, by which the quota counts (`verdict-final`); generation does not wait for them."""
        rnd = self._find(cmd.round_id)
        if rnd is None:
            raise _round_over(cmd.round_id)
        if not rnd.judged:
            raise RequestError(409, "round_id", f"round {cmd.round_id} has count: finished, and nothing to judge")
        self._c.ledger.judge(rnd.run, cmd.accept, cmd.reject)
        self._c.recorder.judged(rnd.run.named([*cmd.accept, *cmd.reject]))
        self._round_end.mark_due()
        return messages.count_verdicts(rnd.run.verdicts.values())

    def _extend(self, cmd: messages.ExtendRound) -> dict[str, Any]:
        c, rnd = self._c, self._find(cmd.round_id)
        if rnd is None:
            raise _round_over(cmd.round_id)
        if cmd.quota_add:
            if rnd.spec.quota is None:
                raise RequestError(409, "quota_add", f"round {cmd.round_id} has no quota to add to")
            if rnd.spec.quota + cmd.quota_add > MAX_QUOTA:
                raise RequestError(400, "quota_add", f"makes the quota greater than {MAX_QUOTA}")
        self._check_prompts(rnd.spec, cmd.prompts)
        groups, forgotten = self._accept(rnd, cmd)
        if rnd.spec.quota is not None:
            rnd.spec.quota += cmd.quota_add
        incarnations = [g.incarnation for g in groups]
        answer = {"quota": rnd.spec.quota, "counted": rnd.counted(), "incarnations": incarnations}
        if cmd.idempotency_key is not None:
            rnd.spec.extensions[cmd.idempotency_key] = messages.Extension(cmd.fingerprint, answer)
        c.recorder.extended(rnd.spec, rnd.number, groups, forgotten)
        self._round_end.mark_due()
        return answer

    def _stop(self, cmd: messages.StopRound) -> dict[str, Any]:
        rnd = self._find(cmd.round_id)
        if rnd is None:
            return {"open": False}
        if not cmd.waited:
            self._round_end.stop(rnd, cmd.deliver)
        elif rnd.has_met_quota():
            self._round_end.stop(rnd, None, "waited")
        return {"open": True}

    def _shut_down(self, *, store: bool) -> None:
        self._c.closing = "the server is shutting down"
        self._pushes.interrupt()
        if store:
            self._tiers.move_all_to_disk()

    def _drop(self, cmd: messages.Drop) -> dict[str, Any]:
        c = self._c
        if cmd.round_id:
            self._round_end.abandon(cmd.run, cmd.round_id)
        trajectories = self._trajectories.drop(cmd)
        run = c.ledger.runs.get(cmd.run)
        if run is None:
            return {"groups": [], "samples": 0, "trajectories": trajectories}
        dropped_groups = run.named(cmd.ids)
        if any(g.counts[State.RUNNING] for g in dropped_groups):
            c.engine.settle()
            self._round_end.end_due()  # the step in flight may have met a quota
            dropped_groups = run.named(cmd.ids)
            self._suspender.suspend([s for g in dropped_groups for s in g.samples.values()])
        samples = c.ledger.drop(run, [g.id for g in dropped_groups])
        c.recorder.dropped(dropped_groups)
        c.trace(f"drop from {cmd.run}", samples)
        for sample in samples:
            self._tiers.release(sample)
            c.engine.forget(sample)
        if not run.groups:
            c.ahead.pop(cmd.run, None)
        self._round_end.mark_due()
        return {
            "groups": [[g.id, g.incarnation] for g in dropped_groups],
            "samples": len(samples),
            "trajectories": trajectories,
        }


def _round_over(round_id: str) -> RequestError:
    return RequestError(409, "round_id", f"round {round_id} has ended")
