"""Step 2 of 9 (admit): who gets a free slot next.

Demand-driven over-provisioning: a sample starts only when a slot is free, so the batch stays full with as few partials
as possible, and prompts that were never started stay untouched. Pure: the same ledger, the same order on every rank.
"""

from collections.abc import Iterator
from itertools import islice

from sglang_april.scheduler.quota import Round
from sglang_april.types import Group, Sample, State


def candidates(rnd: Round) -> Iterator[Sample]:
    """Samples of the round's run in the order in which they are to be admitted.

    Partials first (those of mandatory groups before others, then old batch order), then members of groups already begun
    (near-complete groups first), then new groups as they arrived; mandatory groups lead each class.
    """
    run = rnd.run
    leading = _mandatory_partials(rnd)
    yield from leading
    yield from (s for s in run.suspended.in_order() if s not in leading)
    for group in sorted(run.begun, key=lambda g: (not rnd.must_finish(g), _unfinished(g), g.order)):
        yield from _queued(group)
    for group in islice(run.new, rnd.starts_left()):
        yield from _queued(group)


def _mandatory_partials(rnd: Round) -> dict[Sample, None]:
    """In old batch order. A strict on-policy round must finish them all, so none leads."""
    groups = [] if rnd.on_policy else rnd.mandatory
    partials = [s for g in groups for s in g.samples.values() if s in rnd.run.suspended]
    return dict.fromkeys(sorted(partials, key=lambda s: s.order))


def _unfinished(group: Group) -> int:
    return len(group.samples) - group.counts[State.FINISHED]


def _queued(group: Group) -> list[Sample]:
    return [s for s in group.samples.values() if s.state is State.QUEUED]


def pick(rounds: list[Round], slots: int) -> list[Sample]:
    """At most `slots` samples, round-robin over the open rounds in their order (S6), each within its `concurrency`."""
    lanes = []
    for rnd in rounds:
        limit = slots
        if rnd.spec.concurrency is not None:
            limit = min(slots, max(0, rnd.spec.concurrency - rnd.run.running))
        lanes.append(islice(candidates(rnd), limit))
    chosen: list[Sample] = []
    while lanes and len(chosen) < slots:
        alive = []
        for lane in lanes:
            sample = next(lane, None)
            if sample is None:
                continue
            alive.append(lane)
            chosen.append(sample)
            if len(chosen) == slots:
                break
        lanes = alive
    return chosen
