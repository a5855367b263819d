"""Execute the commands about trajectories. A refused one changes nothing (`refusal-changes-nothing`)."""

from typing import Any

from sglang_april.api import messages
from sglang_april.api.errors import RequestError
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.round_end import RoundEnd
from sglang_april.scheduler.trajectory_ends import TrajectoryEnds


class TrajectoryCommands:
    def __init__(self, context: Context, round_end: RoundEnd, trajectory_ends: TrajectoryEnds) -> None:
        self._c = context
        self._round_end = round_end
        self._trajectory_ends = trajectory_ends

    def end(self, cmd: messages.EndTrajectories) -> dict[str, Any]:
        """End trajectories, done or rejected; idempotent.

        Raises:
            RequestError: as for `TrajectoryRun.check`; 404, the run has had neither a leg nor a round of trajectories.
        """
        known = self._c.trajectories.get(cmd.run)
        if known is None:
            raise RequestError(404, "run", f"there is no run {cmd.run!r} with trajectories")
        known.check(cmd.done, cmd.reject)
        new = {name: known.active[name].group for name in cmd.done if name not in known.ended}
        self._trajectory_ends.end(known, cmd.done, cmd.reject)
        self._round_end.mark_due()
        rnd = self._c.rounds.get(known.legs.key)
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
        self._c.count(trajectory.pending)
        return trajectory.report(self._c.clock.version)

    def drop(self, cmd: messages.Drop) -> int:
        """Delete undelivered trajectories of a run; returns how many."""
        known = self._c.trajectories.get(cmd.run)
        if known is None or cmd.round_id:
            return 0
        names = [name for name in known.active if cmd.ids is None or name in cmd.ids]
        dropped = self._trajectory_ends.drop(known, names)
        self._round_end.mark_due()  # a round may have waited for them
        return dropped
