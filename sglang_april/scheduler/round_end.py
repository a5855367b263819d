"""Check rounds after relevant events and end those that are due; `quota.py` decides whether one is."""

from sglang_april.api import messages
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.trajectory_ends import TrajectoryEnds
from sglang_april.scheduler.trajectory_round import TrajectoryRound


class RoundEnd:
    def __init__(self, context: Context, suspender: Suspender, tiers: Tiers, trajectory_ends: TrajectoryEnds) -> None:
        self.context = context
        self._suspender = suspender
        self._tiers = tiers
        self._trajectory_ends = trajectory_ends
        self._dirty = False

    def mark_due(self) -> None:
        """Check all rounds at the next `end_due`: an event may have ended one."""
        self._dirty = True

    def end_due(self) -> None:
        """End every round that is due (`stop-in-step`). Samples that finish in the step in flight are surplus."""
        if not self._dirty:
            return
        self._dirty = False
        c = self.context
        over = [r for r in c.rounds.values() if self._is_over(r)]
        if not over and not any(r.update_limit_reached() and r.run.running for r in c.ahead.values()):
            return
        c.engine.settle()
        self._dirty = False
        for rnd in list(c.rounds.values()):
            if reason := rnd.ends_now():
                self.end(rnd, reason, None)
            else:
                rnd.stats.quota_not_met()  # the step in flight has drawn the first token of a group that must finish
        for rnd in c.ahead.values():
            if rnd.update_limit_reached():
                self._suspender.suspend_run(rnd.run, rnd.spec.tier)

    def _is_over(self, rnd: Round) -> bool:
        if rnd.ends_now():
            return True
        waited, rnd.waits = rnd.waits, rnd.has_met_quota()
        if rnd.waits and not waited:
            rnd.stats.prolonged = True
            if rnd.spec.wait_s is not None:
                self.context.recorder.send(messages.RoundWaits(rnd.spec.round_id))
        return False

    def stop(self, rnd: Round, ids: list[str] | None, reason: messages.EndReason = "stopped") -> None:
        """End a round with what has finished, or with the groups named."""
        self.context.engine.settle()
        self.end(rnd, reason, ids)

    def abandon(self, run: str, round_id: str) -> None:
        """Close a round that was never accepted, because it could not be journalled: there is no reply.

        Another run may have a round of the same id, which is why it could not be.
        """
        c = self.context
        for rnd in [r for r in c.rounds.values() if (r.spec.run, r.spec.round_id) == (run, round_id)]:
            c.engine.settle()
            self._suspender.suspend_run(rnd.run, rnd.spec.tier)
            del c.rounds[rnd.run.key]
            self._tiers.round_ended()

    def end(self, rnd: Round, reason: messages.EndReason, ids: list[str] | None) -> None:
        """Fix the reply, and suspend the rest or let it run ahead. The step in flight must be settled."""
        c = self.context
        c.quota_met(rnd)
        verdicts = {g.id: verdict for g, verdict in rnd.run.verdicts.items()} if rnd.judged else {}
        deliver = rnd.deliver(c.ledger, reason, ids, c.clock.version)
        c.trace(f"end round {rnd.spec.round_id} ({reason}, {len(deliver)} groups)", detail=deliver)
        runs_ahead = rnd.spec.after_quota == "continue"
        if not runs_ahead or rnd.update_limit_reached():
            self._suspender.suspend_run(rnd.run, rnd.spec.tier)
        if isinstance(rnd, TrajectoryRound):
            rnd.trajectories.rejected |= dict.fromkeys(rnd.surplus)
            self._trajectory_ends.drop(rnd.trajectories, rnd.surplus)
        carried = report.carried(c, rnd.run)
        del c.rounds[rnd.run.key]
        self._tiers.round_ended()
        rnd.stats.kv_lost = self._tiers.lost.pop(rnd.run.key, 0)
        stats, lengths = {**rnd.stats.report(carried), **report.concurrency(rnd)}, report.lengths(rnd.run)
        stats["kv_cost"] = report.kv_cost(c)
        ended = messages.RoundEnded(
            rnd.spec.round_id,
            rnd.spec.run,
            c.clock.version,
            reason,
            deliver,
            carried,
            stats,
            lengths,
            verdicts=verdicts,
        )
        if isinstance(rnd, TrajectoryRound):
            self._end_trajectories(rnd, ended)
        else:
            c.recorder.ended(ended)
        if runs_ahead and (rnd.run.groups or isinstance(rnd, TrajectoryRound)):
            rnd.run_ahead()
            c.ahead[rnd.run.key] = rnd

    def _end_trajectories(self, rnd: TrajectoryRound, ended: messages.RoundEnded) -> None:
        run = rnd.trajectories
        ended.trajectories, ended.rejected, run.rejected = rnd.delivered, list(run.rejected), {}
        ended.carried["trajectories"] = rnd.report(self.context.clock.version)
        self.context.recorder.ended(ended, rnd.legs)
