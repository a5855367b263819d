"""Requests of SGLang's own routes that belong to a run (`attached-request`).

An attached request is created, queued, answered and aborted by SGLang, as any request of a client. Here it is a sample
as well, so that a push, a pause, a flush or memory pressure suspends it instead of aborting it: its caller only waits
longer. It is a group of one in a separate kind of run, which no round of rollouts counts, delivers or ends.

One that names a trajectory is a leg of it. Legs have a separate run, whose rounds count trajectories; they enter
the engine by admission, as samples do.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sglang_april.api import messages
from sglang_april.api.messages import EndedRequest, FinishedSample
from sglang_april.api.run_keys import run_key
from sglang_april.recovery.journal_snapshot import Chunk, SnapshotGroup
from sglang_april.scheduler.attached_journal import tokens_of
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Sample, SampleKv, State
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.trajectories import Leg, Trajectory
from sglang_april.scheduler.trajectory_ends import TrajectoryEnds


class Attached:
    def __init__(self, context: Context, suspender: Suspender, tiers: Tiers) -> None:
        self._c = context
        self._suspender = suspender
        self._tiers = tiers
        self.trajectory_ends = TrajectoryEnds(context, tiers, self.abort)

    def refusal(self, run: str, trajectory: str | None, group: str | None) -> str:
        """Why a request cannot be a leg of the trajectory that it names, or an empty string."""
        known = self._c.trajectories.get(run)
        return known.refusal(trajectory, group) if known is not None and trajectory is not None else ""

    def refused(self, rid: str) -> None:
        """Report the end of a request that never began, so that its answer does not wait for a description."""
        self._c.recorder.send(messages.AttachedEnded([EndedRequest(rid, [], self._c.clock.version)]))

    def description(self, sample: Sample, length: int | None = None) -> EndedRequest:
        """The spans and version that the answer to a request contains, if it ends with `length` output tokens."""
        rid = sample.group.id.partition(":")[2]
        return EndedRequest(rid, sample.closed_spans(length), self._c.clock.version)

    def begin(
        self,
        run: str,
        rid: str,
        input_ids: bytes,
        params: bytes = b"",
        trajectory: str | None = None,
        group: str | None = None,
    ) -> Sample:
        """A request arrives that SGLang is about to queue.

        Args:
            input_ids: int32 [prompt_len].
            params: everything else that its output depends on; empty if it is not to be journalled.
        """
        c = self._c
        leg, rounds = None, False
        saved = self._saved(run_key("requests" if trajectory is None else "legs", run), rid, input_ids, params)
        answered = saved is not None and saved.samples[0].finished is not None
        if trajectory is not None and answered and c.trajectory_run(run).recorded(trajectory, rid):
            trajectory = None  # the record has this leg; only its answer is sent again
        if trajectory is None:
            owner = c.ledger.runs.get(run_key("requests", run)) or c.new_attached_run("requests", run)
        else:
            known = c.trajectory_run(run)
            leg = known.begin_leg(trajectory, group, rid, np.frombuffer(input_ids, "<i4"))
            owner, rounds = known.legs, known.rounds_opened > 0
        parked = _claim(leg) if saved is None else None
        sample = c.ledger.add_attached(owner, rid, input_ids, params, saved, leg, parked)
        if parked is not None:
            self._tiers.changed_priority(sample)
        if saved is not None:
            _restore(sample, tokens_of(saved), saved.samples[0].finished)
        if leg is not None:
            leg.trajectory.pending[sample] = leg
            if sample.length:
                leg.prefilled = len(leg.prompt)
                self.first_token(leg.trajectory, sample)
            self.trajectory_ends.forget_unused(leg.trajectory.run)
        if owner.key not in c.attached and not rounds:
            c.attached[owner.key] = Round(_spec(owner), owner, 0)
        c.trace("attach", [sample])
        c.ledger.admit(sample)
        if sample.kv.pages is None:
            sample.kv.begin(c.clock.version)
        sample.open_span(c.clock.version, "recomputed" if sample.length else "fresh")
        sample.recompute.in_progress = sample.length > 0
        return sample

    def first_token(self, trajectory: Trajectory, sample: Sample) -> None:
        """A leg has drawn its first token."""
        if trajectory.first_token(sample.spans[0].version):
            self._c.recorder.trajectories([trajectory])

    def created(self, sample: Sample) -> None:
        """SGLang has queued the request: a leg waits for its admission instead."""
        if sample.group.leg is not None:
            self._suspender.suspend([sample])

    def _saved(self, run: str, rid: str, input_ids: bytes, params: bytes) -> SnapshotGroup | None:
        """The same request in the journal, of a server that was killed."""
        saved = self._c.saved_attached.pop((run, rid), None)
        if saved is None:
            return None
        same = (saved.prompt.input_ids, saved.params) == (input_ids, params)
        self._c.recorder.asked_again(saved.gid, same=same)
        return saved if same else None

    def end(self, samples: Iterable[Sample], reason: dict[str, Any] | None = None) -> None:
        """Report spans and version of requests that SGLang has answered or is about to answer, finished or aborted.

        The engine's requests stay with SGLang, which may report them again: a request that has ended is ignored.

        Args:
            reason: the finish reason, if an engine's request has none.
        """
        ended = [self._end(sample, reason) for sample in samples if sample.group.id in sample.group.run.groups]
        if to_report := [one for one in ended if one is not None]:
            self._c.recorder.send(messages.AttachedEnded(to_report))

    def _end(self, sample: Sample, reason: dict[str, Any] | None) -> EndedRequest | None:
        """What an event must report: nothing if the answer or a record describes it and the audit does not need it."""
        c, run, leg = self._c, sample.group.run, sample.group.leg
        if leg is not None and c.engine.refused(sample):
            leg.trajectory.refuse_leg(leg, sample)
            leg = None
        is_described = leg is not None or c.engine.has_described(sample)
        c.trace("end attached", [sample])
        c.recorder.attached_ended(sample)
        result = c.engine.answered(sample) if c.audited else None
        if leg is not None and self._parks(sample, leg.trajectory):
            self._end_leg(sample, leg, reason)
            c.ledger.park(sample)
            self._tiers.changed_priority(sample)
            self._tiers.limit_parked()
        else:
            self._tiers.release(sample)
            if leg is not None:
                self._end_leg(sample, leg, reason)
            c.engine.forget(sample)
            c.ledger.remove_attached(sample)
        if not run.groups:
            c.attached.pop(run.key, None)
        if is_described and result is None:
            return None
        ended = self.description(sample)
        if result is not None:
            result.run, result.id = run.name, ended.rid
            ended.drawn = sample.group.prompt, result
        return ended

    def _parks(self, sample: Sample, trajectory: Trajectory) -> bool:
        """Whether the sample keeps its KV for the next leg."""
        run = trajectory.run
        active = run.active.get(trajectory.id) is trajectory and not trajectory.done
        return active and sample.kv.pages is not None and self._c.park_cap_tokens > 0

    def _end_leg(self, sample: Sample, leg: Leg, reason: dict[str, Any] | None) -> None:
        """Its tokens go to the HTTP process; pages that the sample has stay its own."""
        trajectory = leg.trajectory
        kv, sample.kv = sample.kv, SampleKv()
        result = self._c.engine.finished(sample, reason)
        result.top_logprobs = None  # no record has them
        sample.kv, sample.finish_step = kv, self._c.step
        gone = trajectory.end_leg(leg, np.frombuffer(result.output_ids, "<i4"))
        trajectory.sequences[-1].parked = sample if kv.pages is not None else None
        for parked in [s.parked for s in gone if s.parked is not None]:
            self._tiers.release(parked)
        del trajectory.pending[sample]
        self._c.recorder.leg_ended(
            messages.LegEnded(
                trajectory.run.name,
                trajectory.id,
                trajectory.group,
                leg.number,
                leg.rid,
                leg.parent,
                leg.shared,
                leg.prompt[leg.shared :].tobytes(),
                min(leg.prefilled, len(leg.prompt)),
                result,
                leg.mismatch,
                self._c.clock.version,
            )
        )
        if trajectory.legs_ended == 1:  # without a token, the journal does not know it yet
            self._c.recorder.trajectories([trajectory])

    def abort(self, samples: list[Sample]) -> None:
        """Answer requests with the tokens that they have."""
        self._suspender.suspend_now(samples)
        pending = [sample for sample in samples if sample.request is not None]  # the step in flight has not ended them
        for sample in pending:
            self._c.engine.answer_aborted(sample)
        self.end(pending)

    def abort_named(self, wanted: Callable[[Any], bool]) -> None:
        """Abort the attached requests whose engine's request is `wanted`, at any time.

        A server that shuts down disconnects its clients: their requests stay in the journal.
        """
        if not self._c.closing and (named := self.named(wanted)):
            self.abort(named)
            self._c.recorder.commit()  # under a pause, no step does

    def named(self, wanted: Callable[[Any], bool]) -> list[Sample]:
        """The attached requests whose engine's request is `wanted`."""
        groups = (group for run in self._c.ledger.runs.values() if run.attached for group in run.groups.values())
        return [sample for group in groups for sample in group.samples.values() if wanted(sample.request)]

    def keep_suspended(self) -> None:
        """While samples may not step, neither may requests that have arrived since they were suspended."""
        if running := [s for rnd in self._c.attached.values() for s in rnd.run.samples(State.RUNNING)]:
            self._suspender.suspend_now(running)


def _claim(leg: Leg | None) -> Sample | None:
    """The sample that holds the KV of the sequence that a leg continues; no other leg gets it."""
    if leg is None or leg.extends is None:
        return None
    parked, leg.extends.parked = leg.extends.parked, None
    return parked


def _restore(sample: Sample, tokens: Chunk, answered: FinishedSample | None) -> None:
    marks = sample.journal
    marks.snapshot, marks.admission, marks.answered = tokens, True, answered
    sample.length = marks.tokens = tokens.length
    sample.spans = list(tokens.spans)


def _spec(run: Run) -> messages.RoundSpec:
    return messages.RoundSpec("", run.name, quota=None, quota_unit="sample", kv=run.kv, max_staleness=None)
