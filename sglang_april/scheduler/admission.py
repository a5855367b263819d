"""Step 2 of 9 (admit): who gets a free slot next.

Demand-driven over-provisioning: a sample starts only when a slot is free, so the batch stays full with as few partials
as possible, and prompts that were never started stay untouched. Pure: the same ledger, the same order on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group, Sample, State


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


def pick(rounds: list[Round], slots: int, among: Callable[[Round], Iterator[Sample]] = candidates) -> list[Sample]:
    """At most `slots` samples, round-robin over the open rounds in their order (S6), each within its `concurrency`."""
    lanes = [islice(among(rnd), places(rnd, slots)) for rnd in rounds]
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


def places(rnd: Round, slots: int) -> int:
    """How many of `slots` the round may take."""
    if rnd.concurrency is None:
        return slots
    return min(slots, max(0, rnd.concurrency - rnd.run.running))


class PrefillBatcher:
    """Samples that need a prefill wait for one another, and share it.

    Samples end one by one, and a prefill stalls all that decode for about a step. So whoever waits for a prefill waits
    until the free places have lost as many tokens as the prefill will cost the others. That is never more than twice
    the least possible loss, however samples end (as in renting or buying skis), it is the least one when they end
    evenly (the economic order quantity), and nobody waits longer than `STEPS` per running sample.
    """

    STEPS = 1
    """What a prefill costs, in decode steps of all that run; `bench.simulate reach` compares."""

    def __init__(self) -> None:
        self._lost = 0

    def is_due(self, rounds: Sequence[Round], chosen: Sequence[Sample], slots: int) -> bool:
        """Once per step, with what `pick` chose of `rounds` for `slots`: whether it is to start now."""
        room = min(slots, sum(places(rnd, slots) for rnd in rounds))
        self._lost += room
        running = sum(rnd.run.running for rnd in rounds)
        lanes = {rnd.run: rnd for rnd in rounds}
        if (
            len(chosen) < room  # the last there are: nobody will join them
            or self._lost >= self.STEPS * running
            or any(lanes[s.group.run].on_policy or lanes[s.group.run].must_finish(s.group) for s in chosen)
        ):
            self._lost = 0
            return True
        return False
