"""Write state changes to the journal, on rank 0 only and only with a journal.

Records of one step or command are collected and put into the journal together (`commit`). No decision depends on the
journal: ranks without one decide alike (`rank-determinism`).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sglang_april.api.messages import (
    Answer,
    Event,
    Finished,
    FinishedSample,
    JournalFault,
    LegEnded,
    RoundEnded,
    RoundSpec,
)
from sglang_april.recovery import journal_trajectories, schema
from sglang_april.recovery.journal import Journal
from sglang_april.recovery.journal_snapshot import SnapshotGroup
from sglang_april.recovery.outbox import Outbox
from sglang_april.scheduler.attached_journal import KeptRequests
from sglang_april.scheduler.engine import Engine
from sglang_april.scheduler.ledger import Forgotten
from sglang_april.scheduler.state import Group, Sample
from sglang_april.scheduler.trajectories import Trajectory


class Unrecorded:
    """Without a journal: events are sent at once and nothing is recorded."""

    interval = 0
    """Output tokens after which a running sample is recorded (`drawn`); 0: never."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def send(self, event: Event) -> None:
        """Send an event to the HTTP process."""
        self._engine.send(event)

    def answer(self, answer: Answer, *, lasting: bool) -> None:  # noqa: ARG002
        """Send an answer to the HTTP process; with a journal, a `lasting` one once all changes so far are written."""
        self._engine.send(answer)

    def accepted(self, spec: RoundSpec, number: int, groups: Iterable[Group], forgotten: list[Forgotten]) -> None: ...

    def extended(self, spec: RoundSpec, number: int, groups: Iterable[Group], forgotten: list[Forgotten]) -> None:
        """An open round has a new quota, or more groups."""

    def judged(self, groups: Iterable[Group]) -> None:
        """The caller has judged these groups."""

    def admitted(self, sample: Sample) -> None:
        """A sample enters the engine; only the first time is recorded."""

    def drawn(self, sample: Sample) -> None:
        """An unfinished sample has new tokens: it is suspended, or `interval` is reached."""

    def finished(self, sample: Sample, result: FinishedSample) -> None: ...

    def attached_ended(self, sample: Sample) -> None:
        """SGLang answers an attached request, whose engine's request still has everything."""

    def asked_again(self, gid: int, *, same: bool) -> None:
        """An attached request in the journal is sent again, or its `rid` is used by another one."""

    def announced(self, event: Finished) -> None:
        """Finished samples; with a journal they are sent once they are written, so that a crash replaces no token that
        a stream has shown."""
        self._engine.send(event)

    def leg_ended(self, event: LegEnded) -> None:
        """A leg of a trajectory; with a journal it is sent, and then its answer, once it is written."""
        self._engine.send(event)

    def trajectories(self, changed: Iterable[Trajectory]) -> None:
        """Trajectories have begun or ended."""

    def trajectories_forgotten(self, run: str, ids: list[str]) -> None:
        """Trajectories of a run without rounds are no longer kept."""

    def ended(self, event: RoundEnded, legs: Mapping[str, int] | None = None) -> None:  # noqa: ARG002
        """The reply is fixed; with a journal it is sent once it is written.

        `legs`: in a round of trajectories, how many legs each of its records has.
        """
        self._engine.send(event)

    def acknowledged(self, round_id: str) -> None: ...

    def reply_deleted(self, round_id: str) -> None: ...

    def dropped(self, groups: Iterable[Group]) -> None: ...

    def version(self, number: int) -> None: ...

    def commit(self) -> None:
        """End of a step or a command."""

    def state(self) -> dict[str, Any] | None:
        """The journal as `GET /april/state` reports it; None without one."""
        return None

    def close(self) -> None:
        """The server ends: write everything and close the journal."""


class Recorder(Unrecorded):
    def __init__(
        self, engine: Engine, journal: Journal, interval: int = 256, attached: Iterable[SnapshotGroup] = ()
    ) -> None:
        """`attached`: the attached requests that the journal has."""
        super().__init__(engine)
        self._kept = KeptRequests(attached)
        self._journal = journal
        self.interval = interval
        self._outbox = Outbox(engine.send)
        self._records: list[schema.Op] = []
        self._batches = 0
        journal.start(self._outbox.release, lambda error: self._outbox.send(JournalFault(error)))

    # --- messages

    def send(self, event: Event) -> None:
        self._outbox.send(event)

    def answer(self, answer: Answer, *, lasting: bool) -> None:
        self._outbox.send(answer, self._batches + bool(self._records) if lasting else 0)

    def announced(self, event: Finished) -> None:
        self.commit()
        self._outbox.send(event, self._batches)

    def leg_ended(self, event: LegEnded) -> None:
        self._records.append(journal_trajectories.leg(event))
        self._outbox.send(event, self._batches + 1)

    def ended(self, event: RoundEnded, legs: Mapping[str, int] | None = None) -> None:
        """Written in a separate batch: no other record can fail this reply, and this record fails no other event."""
        self.commit()
        self._records.append(schema.ended(event, legs))
        self._outbox.send(event, self._batches + 1)
        self.commit()

    # --- records

    def accepted(self, spec: RoundSpec, number: int, groups: Iterable[Group], forgotten: list[Forgotten]) -> None:
        self._records.append(schema.accepted(spec, number, map(_new, groups), forgotten))

    def extended(self, spec: RoundSpec, number: int, groups: Iterable[Group], forgotten: list[Forgotten]) -> None:
        self._records.append(schema.extended(spec, number, map(_new, groups), forgotten))

    def judged(self, groups: Iterable[Group]) -> None:
        self._records.append(schema.judged([(bool(g.accepted), g.gid) for g in groups]))

    def admitted(self, sample: Sample) -> None:
        if not sample.attached and not sample.journal.admission:
            sample.journal.admission = True
            record = schema.admitted(sample.group.gid, sample.index, sample.queue_position, sample.admitted_round)
            self._records.append(record)

    def _begun(self, sample: Sample) -> None:
        """Record the round in which the sample's group first ran, once the sample has tokens (`quota_mode: cohort`)."""
        if not sample.journal.first_token and not sample.attached:
            sample.journal.first_token = True
            group = sample.group
            self._records.append(schema.admitted(group.gid, sample.index, sample.queue_position, group.first_round))

    def drawn(self, sample: Sample) -> None:
        start = sample.journal.tokens
        if sample.length > start and self._has_group(sample):
            chunk = self._engine.record(sample, start)
            if chunk.proximal is not None:
                sample.journal.proximal_version = chunk.proximal[0]
            self._records.append(schema.tokens(sample.group.gid, sample.index, start, chunk))
            sample.journal.tokens = sample.length
            self._begun(sample)

    def _has_group(self, sample: Sample) -> bool:
        """Whether the journal has the sample's group: that of an attached request is written with its first tokens."""
        group, marks = sample.group, sample.journal
        if sample.attached and group.params and not marks.admission:
            self._records.append(schema.attached(group.run.key, _new(group)))
            marks.admission = True
        return marks.admission or not sample.attached

    def finished(self, sample: Sample, result: FinishedSample) -> None:
        tokens = len(result.output_ids) // 4
        start = sample.journal.tokens if sample.journal.tokens <= tokens else 0
        top = None if result.top_logprobs is None else result.top_logprobs[start:]
        tail = msgspec.structs.replace(
            result, output_ids=result.output_ids[4 * start :], logprobs=result.logprobs[4 * start :], top_logprobs=top
        )
        self._records.append(schema.finished(sample.group.gid, start, sample.finish_step, tail))
        self._begun(sample)

    def attached_ended(self, sample: Sample) -> None:
        """Its answer is kept for a caller that has not received it when the server is killed."""
        gid, result = sample.group.gid, self._engine.answered(sample)
        if result is not None and self._has_group(sample):
            if sample.journal.answered is None:
                self.finished(sample, result)
            self._records += [schema.dropped([old]) for old in self._kept.add(gid, sample.length)]
        elif sample.journal.admission:
            self._records.append(schema.dropped([gid]))

    def asked_again(self, gid: int, *, same: bool) -> None:
        self._kept.remove(gid)
        if not same:
            self._records.append(schema.dropped([gid]))

    def trajectories(self, changed: Iterable[Trajectory]) -> None:
        self._records += [journal_trajectories.trajectory(one.saved()) for one in changed]

    def trajectories_forgotten(self, run: str, ids: list[str]) -> None:
        if ids:
            self._records.append(journal_trajectories.forgotten(run, ids))

    def acknowledged(self, round_id: str) -> None:
        self._records.append(schema.acknowledged(round_id))

    def reply_deleted(self, round_id: str) -> None:
        self._records.append(schema.reply_deleted(round_id))

    def dropped(self, groups: Iterable[Group]) -> None:
        if gids := [g.gid for g in groups]:
            self._records.append(schema.dropped(gids))

    def version(self, number: int) -> None:
        self._records.append(schema.version(number))

    def epoch(self, name: str) -> None:
        """The name of this server epoch; written after the disk tier has it."""
        self._records.append(schema.epoch(name))

    def commit(self) -> None:
        if self._records:
            self._batches = self._journal.put(self._records)
            self._records = []

    def state(self) -> dict[str, Any] | None:
        return self._journal.state()

    def close(self) -> None:
        self.commit()
        self._journal.close()


def _new(group: Group) -> schema.NewGroup:
    return group.gid, group.incarnation, group.prompt, group.params
