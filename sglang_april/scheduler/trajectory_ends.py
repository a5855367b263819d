"""Ends, drops and forgets trajectories, with their pending legs and their parked KV, and reports it."""

from collections.abc import Callable, Iterable, Mapping

from sglang_april.api import messages
from sglang_april.api.types import MAX_RUNS
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Sample
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.trajectories import Trajectory
from sglang_april.scheduler.trajectory_run import TrajectoryRun


class TrajectoryEnds:
    def __init__(self, context: Context, tiers: Tiers, abort: Callable[[list[Sample]], None]) -> None:
        """`abort` answers pending legs with the tokens that they have."""
        self._c = context
        self._tiers = tiers
        self._abort = abort

    def end(self, run: TrajectoryRun, done: Mapping[str, bytes], reject: Iterable[str]) -> None:
        """Trajectories are done or rejected; `TrajectoryRun.check` has passed them. Their pending legs are aborted.

        `done`: the caller's reward and metadata of each.
        """
        ended = [t for name, result in done.items() if (t := run.end(name, "done", result)) is not None]
        rejected = [t for name in reject if (t := run.end(name, "rejected")) is not None]
        self._c.trace("trajectories end", detail=[[t.id for t in ended], [t.id for t in rejected]])
        self._leave([*ended, *rejected], rejected)

    def drop(self, run: TrajectoryRun, names: Iterable[str]) -> int:
        """Delete undelivered trajectories, done ones too (`only-drop-deletes`); returns how many."""
        dropped = [t for name in names if (t := run.drop(name)) is not None]
        self._c.trace("drop trajectories", detail=[t.id for t in dropped])
        self._leave(dropped, dropped)
        return len(dropped)

    def forget_unused(self, run: TrajectoryRun) -> None:
        """A leg of the run begins. Remove the least recently used trajectories of runs without rounds, and the least
        recently used runs that have no rounds, or nothing undelivered and no open one: no caller ends them.
        """
        self._forget(run, run.unused())
        runs = self._c.trajectories
        runs[run.name] = runs.pop(run.name)
        if len(runs) > MAX_RUNS:
            unused = [r for r in runs.values() if self._is_unused(r)]
            for other in unused[: len(runs) - MAX_RUNS]:
                self._forget(other, list(other.active.values()), other.ended)
                del runs[other.name]

    def _is_unused(self, run: TrajectoryRun) -> bool:
        key = run.legs.key
        in_round = key in self._c.rounds or key in self._c.ahead
        return not (in_round or run.legs.groups or (run.rounds_opened and run.active))

    def _forget(self, run: TrajectoryRun, unused: list[Trajectory], ended: Iterable[str] = ()) -> None:
        """Forget trajectories, and also of those with the ids `ended` that they have ended."""
        run.forget(unused)
        self._leave([], unused)
        self._c.recorder.trajectories_forgotten(run.name, list({t.id: None for t in unused} | dict.fromkeys(ended)))

    def _leave(self, ended: list[Trajectory], removed: list[Trajectory]) -> None:
        pending = [sample for trajectory in ended for sample in trajectory.pending]
        if pending:
            self._abort(pending)
        for sample in [sample for trajectory in [*ended, *removed] for sample in trajectory.take_parked()]:
            self._tiers.release(sample)
        self._c.recorder.trajectories(ended)
        if removed:
            name, ids = removed[0].run.name, [t.id for t in removed]
            self._c.recorder.send(messages.TrajectoriesRemoved(name, ids))
