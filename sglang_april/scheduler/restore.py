"""After a restart, restore the ledger, the open rounds and the policy version from the journal
(`restart-loses-nothing`).

Every rank calls these functions with the same `JournalSnapshot` and the same outcomes of the search for KV.
"""

from collections.abc import Callable, Sequence

import msgspec

from sglang_april.api.messages import FinishedSample, Restored, SavedTrajectory
from sglang_april.api.run_keys import parse_run_key
from sglang_april.kv.kv_pages import StoredKv
from sglang_april.recovery import snapshot_reader
from sglang_april.recovery.journal_snapshot import JournalSnapshot, SnapshotGroup
from sglang_april.recovery.kv_recovery import Outcome
from sglang_april.scheduler.attached_journal import saved_requests
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.round_opening import open_round
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tiers import Tiers

FindKv = Callable[[Sequence[tuple[Sample, StoredKv]]], Sequence[Outcome]]
"""Searches the disk tiers of all ranks together: one outcome per sample."""

RESTARTED = "the server was restarted during this round; its statistics begin at the restart"


def starting_version(given: int | None, saved: int, *, damaged: bool = False) -> tuple[int, bool]:
    """The policy version to start with, and whether the caller must name it before any sample may step.

    `damaged`: the journal's record of its version is, so that `saved` may be too low.

    Raises:
        ValueError: the given version is older than the journal's.
    """
    if given is None:
        return saved, damaged or saved > 0
    if given < saved:
        raise ValueError(f"--april-version {given} is below {saved}, the policy version of the journal")
    return given, False


def restore(c: Context, saved: JournalSnapshot) -> None:
    """Fill an empty ledger. Samples restart from their last record; `recover_kv` restores their KV."""
    c.ledger.restore(saved)
    c.step = max((s.step for g in saved.groups for s in g.samples), default=0)
    _restore_trajectories(c, saved)
    for known in saved.rounds:
        open_round(c, known.spec, known.number).stats.warnings.append(RESTARTED)
    c.saved_attached = saved_requests(saved)


def _restore_trajectories(c: Context, saved: JournalSnapshot) -> None:
    of_run: dict[str, list[SavedTrajectory]] = {}
    for one in saved.trajectories:
        of_run.setdefault(one.run, []).append(one)
    for name, trajectories in of_run.items():
        c.trajectory_run(name).restore(trajectories)
    for key, count in saved.rounds_opened.items():
        kind, name = parse_run_key(key)
        if kind == "legs":
            c.trajectory_run(name).legs.rounds_opened = count


def recover_kv(c: Context, tiers: Tiers, find_kv: FindKv) -> None:
    """Take over the KV files that verify on all ranks, as far as the disk tier's budget goes."""
    partials = sorted(c.ledger.samples(State.SUSPENDED), key=lambda s: s.queue_position)
    wanted = [(sample, _kv_to_find(sample)) for sample in partials]
    for (sample, kv), outcome in zip(wanted, find_kv(wanted), strict=True):
        if outcome == "":
            tiers.recover_kv(sample, kv)
        elif outcome is not None:
            tiers.discard_unusable(sample, outcome)


def _kv_to_find(sample: Sample) -> StoredKv:
    """Length and version of a suspended sample's KV. Its last token has no KV yet; `kept` spans wrote no old page."""
    length = len(sample.group.prompt.input_ids) // 4 + sample.length - 1
    return StoredKv(length, next(span.version for span in reversed(sample.spans) if span.kv != "kept"))


def restored_event(saved: JournalSnapshot, *, unnamed: bool) -> Restored:
    """The journal's content for the HTTP process; `unnamed`: no round is admitted until the version is named."""
    warnings = []
    if saved.corrupt:
        warnings.append(f"{saved.corrupt} journal records were damaged; their undelivered tokens are generated again")
    if saved.lost:
        warnings[0] += f", but {saved.lost} of them were groups, which are lost: submit their prompts again"
    if saved.lost_replies:
        ids = ", ".join(saved.lost_replies)
        warnings.append(f"kept replies with a damaged record are lost: {ids}; submit their prompts again")
    if saved.forgotten:
        warnings.append(
            f"unfinished attached requests forgotten, the oldest beyond {snapshot_reader.MAX_KEPT}: {saved.forgotten}"
        )
    done = sorted((row for g in saved.groups for row in _finished(g)), key=lambda row: row[0])
    return Restored(
        groups=[(g.run, g.prompt) for g in saved.groups],
        unjudged=[(g.run, g.prompt.id) for g in saved.groups if g.samples and g.whole and g.accepted is None],
        finished=[sample for _, sample in done],
        rounds=[r.spec for r in saved.rounds],
        replies=saved.replies,
        gone=saved.gone,
        unnamed=unnamed,
        warnings=warnings,
        trajectories=[t for t in saved.trajectories if t.state in ("active", "done")],
    )


def _finished(group: SnapshotGroup) -> list[tuple[int, FinishedSample]]:
    """(step, sample) of a group in finish order; the last one completes the group if all others are undamaged."""
    done = [(s.step, msgspec.structs.replace(s.finished, whole=False)) for s in group.samples if s.finished is not None]
    done.sort(key=lambda row: row[0])
    if group.whole:
        done[-1][1].whole = True
    return done
