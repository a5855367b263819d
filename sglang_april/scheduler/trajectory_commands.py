"""Execute the commands about trajectories. A refused one changes nothing (`refusal-changes-nothing`)."""

from typing import Any

from sglang_april.api import messages
from sglang_april.api.errors import RequestError
from sglang_april.scheduler import report
from sglang_april.scheduler.attached import Attached
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.round_end import RoundEnd
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.trajectory_round import TrajectoryRound


class TrajectoryCommands:
    def __init__(self, context: Context, suspender: Suspender, round_end: RoundEnd, attached: Attached) -> None:
        self._c = context
        self._suspender = suspender
        self._round_end = round_end
        self._attached = attached

    def open(self, spec: messages.RoundSpec) -> dict[str, Any]:
        """Open a round of trajectories, whose rules apply to the run's legs from now on.

        Raises:
            RequestError: 409, a round of the run is open.
        """
        c, known = self._c, self._c.trajectory_run(spec.run)
        run = known.legs
        if run.name in c.rounds:
            open_id = c.rounds[run.name].spec.round_id
            raise RequestError(409, "run", f"round {open_id!r} of run {spec.run!r} is still open")
        if isinstance(spec.concurrency, int):
            self._suspender.keep_within(run, spec.concurrency)
        known.rounds_opened += 1
        c.apply_rules(spec, run)
        rnd = TrajectoryRound(spec, run, known.rounds_opened, tuned=c.tuned, trajectories=known)
        rnd.stats.carried_in = report.sizes(run)
        rnd.mark_mandatory(c.clock.version)
        c.recorder.accepted(spec, rnd.number, [], [])
        c.attached.pop(run.name, None)
        c.rounds[run.name] = rnd
        if ahead := c.ahead.pop(run.name, None):
            rnd.stats.ahead = ahead.stats
        self._round_end.mark_due()
        return {"incarnations": [], "policy_version": c.clock.version, "unjudged": []}

    def extend(self, rnd: TrajectoryRound, cmd: messages.ExtendRound) -> dict[str, Any]:
        """Raise the quota of an open round.

        Raises:
            RequestError: 409, the command has prompts.
        """
        if cmd.prompts:
            raise RequestError(409, "prompts", f"round {cmd.round_id} is a round of trajectories, which has none")
        if rnd.spec.quota is not None:
            rnd.spec.quota = rnd.spec.quota + cmd.quota_add
        answer: dict[str, Any] = {"quota": rnd.spec.quota, "counted": rnd.counted(), "incarnations": []}
        if cmd.idempotency_key is not None:
            rnd.spec.extensions[cmd.idempotency_key] = messages.Extension(cmd.fingerprint, answer)
        self._c.recorder.extended(rnd.spec, rnd.number, [], [])
        self._round_end.mark_due()
        return answer

    def end(self, cmd: messages.EndTrajectories) -> dict[str, Any]:
        """End trajectories, done or rejected; idempotent.

        Raises:
            RequestError: as for `TrajectoryRun.check`; 404, the run has had neither a leg nor a round of trajectories.
        """
        known = self._c.trajectories.get(cmd.run)
        if known is None:
            raise RequestError(404, "run", f"there is no run {cmd.run!r} with trajectories")
        known.check(cmd.done, cmd.reject)
        new = [name for name in cmd.done if name not in known.ended]
        self._attached.end_trajectories(known, cmd.done, cmd.reject)
        self._round_end.mark_due()
        rnd = self._c.rounds.get(known.legs.name)
        return {
            "done": len(cmd.done),
            "rejected": len(cmd.reject),
            "new": new,
            "round_id": rnd.spec.round_id if rnd is not None else None,
            "counted": rnd.counted() if rnd is not None else len(known.done),
            "quota": rnd.spec.quota if rnd is not None else None,
        }

    def get(self, cmd: messages.GetTrajectory) -> dict[str, Any]:
        """The state of an undelivered trajectory.

        Raises:
            RequestError: 404, the run has no such trajectory.
        """
        known = self._c.trajectories.get(cmd.run)
        if known is None or (trajectory := known.active.get(cmd.id)) is None:
            raise RequestError(404, "id", f"run {cmd.run!r} has no undelivered trajectory {cmd.id!r}")
        return trajectory.report(self._c.clock.version)

    def drop(self, cmd: messages.Drop) -> int:
        """Delete undelivered trajectories of a run; returns how many."""
        known = self._c.trajectories.get(cmd.run)
        if known is None or cmd.round_id:
            return 0
        names = [name for name in known.active if cmd.ids is None or name in cmd.ids]
        return self._attached.drop_trajectories(known, names)
