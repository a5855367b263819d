"""Steps 3 to 6 of 9: when rounds are looked at, and what happens when one ends (`quota.py` says whether it does)."""

from sglang_april.api import messages
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers


class RoundEnd:
    def __init__(self, context: Context, suspender: Suspender, tiers: Tiers) -> None:
        self.context = context
        self._suspender = suspender
        self._tiers = tiers
        self._dirty = False

    def look(self) -> None:
        """Something has happened that may end a round."""
        self._dirty = True

    def end_due(self) -> None:
        """Stop in the step that meets the quota. What ends in the step in flight is surplus (`stop-in-step`)."""
        if not self._dirty:
            return
        self._dirty = False
        c = self.context
        over = [r for r in c.rounds.values() if self._is_over(r)]
        if not over and not any(r.update_rest() and r.run.running for r in c.ahead.values()):
            return
        c.engine.settle()
        self._dirty = False
        for rnd in list(c.rounds.values()):
            if reason := rnd.ends_now():
                self.end(rnd, reason, None)
            else:
                rnd.stats.quota_not_met()  # the step in flight has drawn the first token of a group that must finish
        for rnd in c.ahead.values():
            if rnd.update_rest():
                self._suspender.suspend_run(rnd.run, rnd.spec.tier)

    @staticmethod
    def _is_over(rnd: Round) -> bool:
        if rnd.ends_now():
            return True
        rnd.stats.prolonged |= rnd.spec.quota is not None and rnd.counted() >= rnd.spec.quota
        return False

    def stop(self, rnd: Round, ids: list[str] | None) -> None:
        """End a round with what has finished, or with the groups named."""
        self.context.engine.settle()
        self.end(rnd, "stopped", ids)

    def end(self, rnd: Round, reason: messages.EndReason, ids: list[str] | None) -> None:
        """Step 4 and 6: the reply is fixed; the rest is suspended, or runs ahead. The step in flight is settled."""
        c = self.context
        rnd.stats.quota_met()
        deliver = rnd.deliver(c.ledger, reason, ids, c.clock.version)
        goes_on = rnd.spec.after_quota == "continue"
        if not goes_on or rnd.update_rest():
            self._suspender.suspend_run(rnd.run, rnd.spec.tier)
        carried = report.carried(c, rnd.run)
        del c.rounds[rnd.run.name]
        self._tiers.round_ended()
        rnd.stats.kv_lost = self._tiers.lost.pop(rnd.run.name, 0)
        stats, lengths = {**rnd.stats.report(carried), **report.concurrency(rnd)}, report.lengths(rnd.run)
        stats["kv_cost"] = report.kv_cost(c)
        c.recorder.ended(
            messages.RoundEnded(
                rnd.spec.round_id, rnd.run.name, c.clock.version, reason, deliver, carried, stats, lengths
            )
        )
        if goes_on and rnd.run.groups:
            rnd.go_ahead()
            c.ahead[rnd.run.name] = rnd
