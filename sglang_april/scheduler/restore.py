"""Step 2 of 9 after a restart: the ledger, the open rounds and the policy version as a journal has them
(`restart-loses-nothing`).

Pure, and called on every rank with the same `Saved` and the same outcome of the search for KV.
"""

from collections.abc import Callable, Sequence

from sglang_april.kv.kv_pages import Found
from sglang_april.recovery.journal_snapshot import Saved, SavedRound
from sglang_april.recovery.kv_recovery import Outcome
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tiers import Tiers

Look = Callable[[Sequence[tuple[Sample, Found]]], Sequence[Outcome]]
"""Searches the files of the disk tier, on all ranks together: one outcome per sample."""

RESTARTED = "the server was restarted in this round: the figures count from then on"


def starting_version(given: int | None, saved: int) -> tuple[int, bool]:
    """The policy version to start with, and whether it has yet to be named before anything may step.

    Raises:
        ValueError: the version given is older than the journal's.
    """
    if given is None:
        return saved, saved > 0
    if given < saved:
        raise ValueError(f"--april-version {given} is below {saved}, the policy version of the journal")
    return given, False


def restore(c: Context, saved: Saved) -> None:
    """Fill an empty ledger. Samples restart from their last record; `regain` gives them KV."""
    c.ledger.restore(saved)
    c.step = max((s.step for g in saved.groups for s in g.samples), default=0)
    for known in saved.rounds:
        _reopen(c, known)


def _reopen(c: Context, known: SavedRound) -> None:
    run = c.ledger.run(known.spec.run)
    rnd = Round(known.spec, run, known.number)
    run.kv, run.max_staleness = known.spec.kv, known.spec.max_staleness
    rnd.stats.carried_in = report.sizes(run)
    rnd.stats.warnings.append(RESTARTED)
    rnd.mark_mandatory(c.clock.version)
    rnd.mark_cohort()
    c.rounds[run.name] = rnd


def regain(c: Context, tiers: Tiers, look: Look) -> None:
    """Partials whose files are there and sound on all ranks have their KV again, as far as the disk's budget goes."""
    partials = sorted(c.ledger.samples(State.SUSPENDED), key=lambda s: s.order)
    wanted = [(sample, _kv_beneath(sample)) for sample in partials]
    for (sample, kv), outcome in zip(wanted, look(wanted), strict=True):
        if outcome == "":
            tiers.recover_kv(sample, kv)
        elif outcome is not None:
            tiers.discard_unusable(sample, outcome)


def _kv_beneath(sample: Sample) -> Found:
    """What a suspended sample stands on: the last token's KV does not exist yet, and `kept` spans wrote no old page."""
    length = len(sample.group.prompt.input_ids) // 4 + sample.length - 1
    return Found(length, next(span.version for span in reversed(sample.spans) if span.kv != "kept"))
