"""Holds every undelivered sample of every run; the only code that creates, delivers or deletes one.

Pure: no clock, no engine, no rank.
"""

import itertools
from collections.abc import Container, Iterable, Iterator

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import Delivery, Prompt
from sglang_april.api.run_keys import parse_run_key
from sglang_april.api.types import MAX_RUNS
from sglang_april.recovery.journal_snapshot import JournalSnapshot, SnapshotGroup
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Group, JournalMarks, LedgerError, Recompute, Sample, State, sample_seed
from sglang_april.scheduler.trajectories import Leg

MAX_IDS = 2**16
"""Prompt ids of a run whose next incarnation is remembered."""

Forgotten = tuple[str, list[str] | None, int]
"""(run, prompt ids or None for all of the run, next incarnation of ids that are not remembered)."""


class Ledger:
    """All runs, and the counters that define arrival and admission order."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        """By key; runs of prompts have the name as their key."""
        self._groups_seen = 0
        self._admissions = 0

    def run(self, name: str) -> Run:
        return self.runs.setdefault(name, Run(name))

    def check(self, run: str, prompts: list[Prompt]) -> None:
        """Refuse prompts whose id is in use (`unique-prompt-id`); nothing changes.

        Raises:
            RequestError: 409, an id is undelivered in this run, or occurs twice.
        """
        known = self.runs.get(run)
        seen: set[str] = set()
        for i, prompt in enumerate(prompts):
            if prompt.id in seen or (known is not None and prompt.id in known.groups):
                raise RequestError(409, f"prompts[{i}].id", f"{prompt.id!r} is still undelivered in run {run!r}")
            seen.add(prompt.id)

    def accept(self, run_name: str, prompts: list[Prompt], params: list[bytes]) -> list[Group]:
        """Add the prompts of a request that `check` has passed; returns their groups."""
        run = self.run(run_name)
        groups = []
        for prompt in prompts:
            incarnation = run.incarnations.pop(prompt.id, run.first_incarnation)
            run.incarnations[prompt.id] = incarnation + 1
            group = Group(run, prompt, params[prompt.params], incarnation, self._groups_seen)
            self._groups_seen += 1
            for index in range(prompt.n):
                group.samples[index] = Sample(group, index, sample_seed(prompt.seed, prompt.id, incarnation, index))
            group.counts[State.QUEUED] = prompt.n
            run.groups[prompt.id] = group
            group.run.queued.update(group)
            groups.append(group)
        return groups

    def add_attached(
        self,
        run: Run,
        rid: str,
        input_ids: bytes,
        params: bytes = b"",
        saved: SnapshotGroup | None = None,
        leg: Leg | None = None,
        parked: Sample | None = None,
    ) -> Sample:
        """Add a request of SGLang's own routes as a group of one (`attached.py`), which `admit` is called with next.

        Args:
            params: what else the request asks for, or empty if it is not journalled.
            saved: the same request in the journal, whose place it takes.
            parked: the sample that holds the KV of the leg's first tokens, which becomes the leg's sample.
        """
        self.runs[run.key] = run
        prompt = saved.prompt if saved else Prompt(f"{self._groups_seen}:{rid}", input_ids, n=1, params=0, seed=0)
        group = Group(run, prompt, params, 0, saved.gid if saved else self._groups_seen, leg=leg)
        self._groups_seen += 1
        sample = group.samples[0] = Sample(group, 0, seed=0) if parked is None else _next_leg(parked, group)
        group.counts[State.QUEUED] = 1
        run.groups[prompt.id] = group
        return sample

    def remove_attached(self, sample: Sample) -> None:
        """Remove an attached request that has ended, and its run with the last one."""
        group, run = sample.group, sample.group.run
        del run.groups[group.id]
        run.running -= group.counts[State.RUNNING]
        run.suspended.pop(sample, None)
        run.queued.remove(group)
        sample.state = State.FINISHED  # a caller that still holds it, for example to suspend it, leaves it alone
        if not run.groups and not run.parked:
            del self.runs[run.key]

    def park(self, sample: Sample) -> None:
        """A leg has ended, and its sample keeps the KV for the next one."""
        run = sample.group.run
        run.suspended.pop(sample, None)
        sample.move(State.PARKED)
        sample.group.run.queued.remove(sample.group)
        del run.groups[sample.group.id]
        run.parked[sample] = None

    def unpark(self, sample: Sample) -> None:
        """The sample no longer holds an ended leg's KV, if it did; a run that this leaves empty is removed."""
        run = sample.group.run
        if sample in run.parked:
            del run.parked[sample]
            if not run.groups and not run.parked:
                self.runs.pop(run.key, None)

    def with_kv(self) -> Iterator[Sample]:
        """All samples with KV pages outside of the engine's batches."""
        for run in self.runs.values():
            yield from (s for s in run.suspended if s.kv.pages is not None)
            yield from (s for s in run.parked if s.kv.pages is not None)

    def requeue(self, groups: Iterable[Group]) -> None:
        """Their trajectory has begun, so they belong to another admission queue."""
        for group in groups:
            group.run.queued.update(group)

    def forget(self, name: str, busy: Container[str]) -> list[Forgotten]:
        """Forget the least recent ids of the run that has accepted prompts, and idle runs, beyond what is remembered.

        `busy`: the runs that have a round.
        """
        run = self.runs[name] = self.runs.pop(name)
        ids = list(itertools.islice(run.incarnations, max(0, len(run.incarnations) - MAX_IDS)))
        run.first_incarnation = max([run.first_incarnation, *map(run.incarnations.pop, ids)])
        others = (r for r in self.runs.values() if r is not run and r.key not in busy)
        idle = [r.key for r in others if not r.groups and not r.parked]
        runs = idle[: max(0, len(self.runs) - MAX_RUNS)]
        for other in runs:
            del self.runs[other]
        return [(name, ids, run.first_incarnation)] * bool(ids) + [(other, None, 0) for other in runs]

    def restore(self, saved: JournalSnapshot) -> None:
        """Fill an empty ledger from a journal."""
        self._groups_seen = saved.next_gid
        for run_name, prompt_id, incarnation in saved.ids:
            if prompt_id:
                self.run(run_name).incarnations[prompt_id] = incarnation
            else:
                self.run(run_name).first_incarnation = incarnation
        for key, count in saved.rounds_opened.items():
            if parse_run_key(key)[0] == "prompts":
                self.run(key).rounds_opened = count
        for known in saved.groups:
            self._restore_group(known)

    def _restore_group(self, known: SnapshotGroup) -> None:
        run, prompt = self.run(known.run), known.prompt
        group = Group(run, prompt, known.params, known.incarnation, known.gid)
        for kept in known.samples:
            sample = Sample(group, kept.index, sample_seed(prompt.seed, prompt.id, known.incarnation, kept.index))
            sample.queue_position, sample.admitted_round = kept.queue_position, kept.number
            sample.journal.admission = kept.queue_position >= 0
            self._admissions = max(self._admissions, kept.queue_position + 1)
            # A sample that ran ahead counts for the round after the last one.
            run.rounds_opened = max(run.rounds_opened, kept.number - 1)
            if kept.finished is not None:
                sample.state, sample.finish_step = State.FINISHED, kept.step
                sample.length, sample.spans = len(kept.finished.output_ids) // 4, list(kept.finished.spans)
                run.finished += 1
            elif kept.chunk is not None:
                sample.state, sample.journal.snapshot = State.SUSPENDED, kept.chunk
                sample.length = sample.journal.tokens = kept.chunk.length
                sample.spans = list(kept.chunk.spans)
                run.suspended[sample] = None
            sample.journal.first_token = sample.length > 0
            group.samples[kept.index] = sample
            group.counts[sample.state] += 1
        group.first_round = min((s.admitted_round for s in group.samples.values() if s.length), default=-1)
        run.groups[prompt.id] = group
        run.whole += group.whole
        if known.accepted is not None:
            run.verdicts[group] = known.accepted
        group.run.queued.update(group)

    def admit(self, sample: Sample) -> None:
        """A queued or suspended sample enters the engine."""
        if sample.queue_position < 0:
            sample.queue_position = self._admissions
            self._admissions += 1
        sample.group.run.suspended.pop(sample, None)
        sample.move(State.RUNNING)
        sample.group.run.queued.update(sample.group)

    def suspend(self, sample: Sample) -> None:
        """A running sample leaves the engine; without a token it is queued again."""
        sample.recompute.in_progress = False
        if sample.length:
            sample.move(State.SUSPENDED)
            sample.group.run.suspended[sample] = None
        else:
            sample.move(State.QUEUED)
        sample.group.run.queued.update(sample.group)

    def finish(self, sample: Sample, step: int) -> None:
        sample.finish_step = step
        sample.move(State.FINISHED)
        run = sample.group.run
        sample.group.run.queued.update(sample.group)
        run.finished += 1
        run.whole += sample.group.whole

    def judge(self, run: Run, accept: list[str], reject: list[str]) -> None:
        """Record the caller's verdicts on whole groups, all or none; repeating them changes nothing (`verdict-final`).

        Raises:
            RequestError: 404 for an unknown id, 409 for a group that has not finished or has the other verdict.
        """
        for name, ids, verdict in (("accept", accept, True), ("reject", reject, False)):
            for i, prompt_id in enumerate(ids):
                group = run.groups.get(prompt_id)
                if group is None:
                    raise RequestError(
                        404, f"{name}[{i}]", f"{prompt_id!r} is not an undelivered prompt of run {run.name!r}"
                    )
                if not group.whole:
                    raise RequestError(409, f"{name}[{i}]", f"the group of {prompt_id!r} has not finished")
                if group.accepted is not None and group.accepted is not verdict:
                    raise RequestError(409, f"{name}[{i}]", f"{prompt_id!r} already has the opposite verdict")
        run.verdicts |= {run.groups[i]: True for i in accept} | {run.groups[i]: False for i in reject}

    def deliver(self, group: Group, indices: list[int]) -> Delivery:
        """Remove finished samples for a reply; the group leaves with its last sample (`delivered-once`).

        Raises:
            LedgerError: a sample has not finished, or is delivered already.
        """
        for index in indices:
            sample = group.samples.get(index)
            if sample is None or sample.state is not State.FINISHED:
                raise LedgerError(f"{group.id}[{index}] is delivered without having finished")
        accepted = group.accepted
        complete = len(indices) == len(group.samples)
        group.run.finished -= len(indices)
        group.run.whole -= group.whole
        for index in indices:
            del group.samples[index]
        group.counts[State.FINISHED] -= len(indices)
        if complete:
            del group.run.groups[group.id]
            group.run.verdicts.pop(group, None)
        else:
            group.run.whole += group.whole
        return Delivery(group.id, group.incarnation, sorted(indices), complete, accepted)

    def drop(self, run: Run, ids: list[str] | None) -> list[Sample]:
        """Delete undelivered groups (`only-drop-deletes`); returns their samples, whose KV the caller releases."""
        doomed = [run.groups.pop(i) for i in (list(run.groups) if ids is None else ids) if i in run.groups]
        for group in doomed:
            run.whole -= group.whole
            run.finished -= group.counts[State.FINISHED]
            run.running -= group.counts[State.RUNNING]
            group.run.queued.remove(group)
            run.verdicts.pop(group, None)
            for sample in group.samples.values():
                run.suspended.pop(sample, None)
        return [sample for group in doomed for sample in group.samples.values()]

    def tokens(self) -> int:
        """Output tokens of all undelivered samples."""
        return sum(
            s.length for run in self.runs.values() for group in run.groups.values() for s in group.samples.values()
        )

    def samples(self, *states: State) -> Iterator[Sample]:
        for run in self.runs.values():
            yield from run.samples(*states)

    def census(self) -> dict[str, int]:
        """Undelivered samples by state, over all runs."""
        totals = dict.fromkeys(State, 0)
        for run in self.runs.values():
            for group in run.groups.values():
                for state, count in group.counts.items():
                    totals[state] += count
        return {state.value: count for state, count in totals.items() if state is not State.PARKED}


def _next_leg(sample: Sample, group: Group) -> Sample:
    """A sample that holds the KV of an ended leg becomes the next one; its place in the order stays."""
    sample.move(State.QUEUED)
    sample.group, sample.length, sample.spans = group, 0, []
    sample.recompute, sample.journal = Recompute(), JournalMarks()
    return sample
