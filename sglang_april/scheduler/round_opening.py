"""Open a round, asked for now or before a restart."""

from sglang_april.api.messages import RoundSpec
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import State
from sglang_april.scheduler.trajectory_round import TrajectoryRound


def open_round(c: Context, spec: RoundSpec, number: int) -> Round:
    """Open the `number`th round of its run, to which the round's rules apply from now on."""
    run = c.run_of(spec)
    rnd: Round
    if spec.trajectories:
        rnd = TrajectoryRound(spec, run, number, tuned=c.tuned, trajectories=c.trajectory_run(spec.run))
    else:
        rnd = Round(spec, run, number, tuned=c.tuned)
    c.apply_rules(spec, run)
    c.count(run.samples(State.RUNNING))
    rnd.stats.carried_in = report.sizes(run)
    rnd.mark_mandatory(c.clock.version)
    rnd.mark_cohort()
    c.attached.pop(run.key, None)
    if ahead := c.ahead.pop(run.key, None):
        rnd.stats.ahead = ahead.stats
    c.rounds[run.key] = rnd
    return rnd
