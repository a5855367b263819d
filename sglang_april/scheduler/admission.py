"""Selects the samples that get the free slots (`admission-order`).

Over-provisioning is demand-driven: a sample starts only when a slot is free, so the batch stays full with as few
partials as possible, and the other prompts stay untouched. Pure: the same ledger gives the same order on every rank.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group, Sample, State


def candidates(rnd: Round) -> Iterator[Sample]:
    """Samples of the round's run in admission order.

    Partials first (those of mandatory groups, then the others, each in their old batch order), then members of groups
    already begun (near-complete groups first), then new groups in arrival order. Mandatory groups lead each class.
    """
    run = rnd.run
    mandatory = _mandatory_partials(rnd)
    yield from mandatory
    yield from (s for s in run.suspended.in_order() if s not in mandatory)
    for group in sorted(run.queued.begun, key=lambda g: (not rnd.must_finish(g), _unfinished(g), g.gid)):
        yield from _queued(group)
    for group in rnd.may_start(run.queued.new):
        yield from _queued(group)


def _mandatory_partials(rnd: Round) -> dict[Sample, None]:
    """Mandatory partials in their old batch order. Empty for strict on-policy rounds, where all are mandatory."""
    groups = [] if rnd.on_policy else rnd.mandatory
    partials = [s for g in groups for s in g.samples.values() if s in rnd.run.suspended]
    return dict.fromkeys(sorted(partials, key=lambda s: s.queue_position))


def _unfinished(group: Group) -> int:
    return len(group.samples) - group.counts[State.FINISHED]


def _queued(group: Group) -> list[Sample]:
    return [s for s in group.samples.values() if s.state is State.QUEUED]


def pick(rounds: list[Round], slots: int, source: Callable[[Round], Iterator[Sample]] = candidates) -> list[Sample]:
    """At most `slots` samples, round-robin over the rounds in their order, each within its concurrency (`fair-slots`).

    Args:
        source: a round's samples in admission order.
    """
    queues = [islice(source(rnd), places(rnd, slots)) for rnd in rounds]
    chosen: list[Sample] = []
    while queues and len(chosen) < slots:
        not_empty = []
        for queue in queues:
            sample = next(queue, None)
            if sample is None:
                continue
            not_empty.append(queue)
            chosen.append(sample)
            if len(chosen) == slots:
                break
        queues = not_empty
    return chosen


def places(rnd: Round, slots: int) -> int:
    """How many of `slots` the round may take within its concurrency."""
    if rnd.concurrency is None:
        return slots
    return min(slots, max(0, rnd.concurrency - rnd.run.running))


class PrefillBatcher:
    """Delays samples that need a prefill until several of them can share one.

    Samples end one by one, and a prefill stalls all decoding samples for about a step. A prefill therefore waits until
    the idle slots have lost as many tokens as the prefill costs the running samples. The total loss is at most twice
    the minimum for any sequence of ends (the ski-rental bound), and minimal for evenly spaced ends (the economic order
    quantity). No sample waits longer than `STEPS` steps per running sample.
    """

    STEPS = 1
    """Cost of a prefill in decode steps of all running samples; `bench.simulate reach` compares values."""

    def __init__(self) -> None:
        self._idle_slot_steps = 0

    def is_due(self, rounds: Sequence[Round], chosen: Sequence[Sample], slots: int) -> bool:
        """Whether the prefill starts now; called once per step with the samples picked for `slots` free slots."""
        free = min(slots, sum(places(rnd, slots) for rnd in rounds))
        self._idle_slot_steps += free
        running = sum(rnd.run.running for rnd in rounds)
        round_of = {rnd.run: rnd for rnd in rounds}
        if (
            len(chosen) < free  # no further sample can join the prefill
            or self._idle_slot_steps >= self.STEPS * running
            or any(round_of[s.group.run].on_policy or round_of[s.group.run].must_finish(s.group) for s in chosen)
        ):
            self._idle_slot_steps = 0
            return True
        return False
