"""Steps 1 to 6: every undelivered sample of every run, and the only code that creates, delivers or deletes one.

Pure: no clock, no engine, no rank. The property tests drive this module with any interleaving of events.
"""

import bisect
from collections.abc import Iterator

from sglang_april.api.errors import RequestError
from sglang_april.api.messages import Delivery, Prompt
from sglang_april.recovery.journal_snapshot import Saved, SavedGroup
from sglang_april.scheduler.state import Group, LedgerError, Run, Sample, State, sample_seed


class Ledger:
    """All runs, and the counters that give samples their order."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self._groups_seen = 0
        self._admissions = 0

    def run(self, name: str) -> Run:
        return self.runs.setdefault(name, Run(name))

    def check(self, run: str, prompts: list[Prompt]) -> None:
        """Refuse a request that names a prompt id still in use (S5); nothing changes."""
        known = self.runs.get(run)
        seen: set[str] = set()
        for i, prompt in enumerate(prompts):
            if prompt.id in seen or (known is not None and prompt.id in known.groups):
                raise RequestError(409, f"prompts[{i}].id", f"{prompt.id!r} is still undelivered in run {run!r}")
            seen.add(prompt.id)

    def accept(self, run_name: str, prompts: list[Prompt], params: list[bytes]) -> list[Group]:
        """Take over the prompts of a request that `check` has passed."""
        run = self.run(run_name)
        groups = []
        for prompt in prompts:
            incarnation = run.incarnations.get(prompt.id, 0)
            run.incarnations[prompt.id] = incarnation + 1
            group = Group(run, prompt, params[prompt.params], incarnation, self._groups_seen)
            self._groups_seen += 1
            for index in range(prompt.n):
                group.samples[index] = Sample(group, index, sample_seed(prompt.seed, prompt.id, incarnation, index))
            group.counts[State.QUEUED] = prompt.n
            run.groups[prompt.id] = group
            self._shelve(group)
            groups.append(group)
        return groups

    def restore(self, saved: Saved) -> None:
        """Take over what a journal holds; the ledger is empty."""
        self._groups_seen = saved.next_gid
        for run_name, prompt_id, incarnation in saved.ids:
            self.run(run_name).incarnations[prompt_id] = incarnation
        for run_name, count in saved.rounds_opened.items():
            self.run(run_name).rounds_opened = count
        for known in saved.groups:
            self._restore_group(known)

    def _restore_group(self, known: SavedGroup) -> None:
        run, prompt = self.run(known.run), known.prompt
        group = Group(run, prompt, known.params, known.incarnation, known.gid)
        for kept in known.samples:
            sample = Sample(group, kept.index, sample_seed(prompt.seed, prompt.id, known.incarnation, kept.index))
            sample.order, sample.admitted_round = kept.place, kept.number
            sample.recorded_admission = kept.place >= 0
            self._admissions = max(self._admissions, kept.place + 1)
            # What ran ahead counts for the round after the last.
            run.rounds_opened = max(run.rounds_opened, kept.number - 1)
            if kept.finished is not None:
                sample.state, sample.finish_step = State.FINISHED, kept.step
                sample.length, sample.spans = len(kept.finished.output_ids) // 4, list(kept.finished.spans)
                run.finished += 1
            elif kept.chunk is not None:
                sample.state, sample.recall = State.SUSPENDED, kept.chunk
                sample.length = sample.recorded = kept.chunk.length
                sample.spans = list(kept.chunk.spans)
                run.suspended[sample] = None
            sample.recorded_begin = sample.length > 0
            group.samples[kept.index] = sample
            group.counts[sample.state] += 1
        group.first_round = min((s.admitted_round for s in group.samples.values() if s.length), default=-1)
        run.groups[prompt.id] = group
        run.whole += group.whole
        if known.accepted is not None:
            run.verdicts[group] = known.accepted
        self._shelve(group)

    def admit(self, sample: Sample) -> None:
        """A queued or suspended sample enters the engine."""
        if sample.order < 0:
            sample.order = self._admissions
            self._admissions += 1
        sample.group.run.suspended.pop(sample, None)
        sample.move(State.RUNNING)
        self._shelve(sample.group)

    def suspend(self, sample: Sample) -> None:
        """A running sample leaves the engine; without a token it was never started."""
        sample.recomputing = False
        if sample.length:
            sample.move(State.SUSPENDED)
            sample.group.run.suspended[sample] = None
        else:
            sample.move(State.QUEUED)
        self._shelve(sample.group)

    def finish(self, sample: Sample, step: int) -> None:
        sample.finish_step = step
        sample.move(State.FINISHED)
        run = sample.group.run
        run.suspended.pop(sample, None)
        self._shelve(sample.group)
        run.finished += 1
        run.whole += sample.group.whole

    def judge(self, run: Run, accept: list[str], reject: list[str]) -> None:
        """Take the caller's verdicts on whole groups, all or none; the same again changes nothing (S3)."""
        for name, ids, verdict in (("accept", accept, True), ("reject", reject, False)):
            for i, prompt_id in enumerate(ids):
                group = run.groups.get(prompt_id)
                if group is None:
                    raise RequestError(
                        404, f"{name}[{i}]", f"{prompt_id!r} is no undelivered prompt of run {run.name!r}"
                    )
                if not group.whole:
                    raise RequestError(409, f"{name}[{i}]", f"the group of {prompt_id!r} has not finished")
                if group.accepted is not None and group.accepted is not verdict:
                    raise RequestError(409, f"{name}[{i}]", f"{prompt_id!r} has been judged the other way")
        run.verdicts |= {run.groups[i]: True for i in accept} | {run.groups[i]: False for i in reject}

    def deliver(self, group: Group, indices: list[int]) -> Delivery:
        """Hand finished samples out, for ever; the group leaves with its last one."""
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
        """Delete undelivered groups (S2: the only thing that does); returns their samples, for the engine to let go."""
        doomed = [run.groups.pop(i) for i in (list(run.groups) if ids is None else ids) if i in run.groups]
        for group in doomed:
            run.whole -= group.whole
            run.finished -= group.counts[State.FINISHED]
            run.running -= group.counts[State.RUNNING]
            self._unshelve(group)
            run.verdicts.pop(group, None)
            for sample in group.samples.values():
                run.suspended.pop(sample, None)
        return [sample for group in doomed for sample in group.samples.values()]

    @classmethod
    def _shelve(cls, group: Group) -> None:
        """Keep `Run.new` and `Run.begun` true, so that admission never searches a large pool."""
        shelf = ("begun" if group.begun else "new") if group.counts[State.QUEUED] else ""
        if shelf == group.shelf:
            return
        cls._unshelve(group)
        group.shelf = shelf
        if shelf == "begun":
            group.run.begun[group] = None
        elif shelf == "new":
            bisect.insort(group.run.new, group, key=lambda g: g.order)

    @staticmethod
    def _unshelve(group: Group) -> None:
        if group.shelf == "begun":
            del group.run.begun[group]
        elif group.shelf == "new":
            new = group.run.new
            del new[bisect.bisect_left(new, group.order, key=lambda g: g.order)]
        group.shelf = ""

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
        return {state.value: count for state, count in totals.items()}
