"""Requests of SGLang's own routes that belong to a run (`attached-request`).

An attached request is created, queued, answered and aborted by SGLang, as any request of a client. Here it is a sample
as well, so that a push, a pause, a flush or memory pressure suspends it instead of aborting it: its caller only waits
longer. It is a group of one in a run of its own kind, which no round of rollouts counts, delivers or ends.
"""

from collections.abc import Callable
from typing import Any

from sglang_april.api import messages
from sglang_april.api.messages import FinishedSample
from sglang_april.recovery.journal_snapshot import Chunk, SnapshotGroup
from sglang_april.scheduler.attached_journal import tokens_of
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import ATTACHED, Sample, State
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers


class Attached:
    def __init__(self, context: Context, suspender: Suspender, tiers: Tiers) -> None:
        self._c = context
        self._suspender = suspender
        self._tiers = tiers

    def begin(self, run: str, rid: str, input_ids: bytes, params: bytes = b"") -> Sample:
        """A request arrives that SGLang is about to queue.

        Args:
            input_ids: int32 [prompt_len].
            params: everything else that its output depends on; empty if it is not to be journalled.
        """
        c, name = self._c, ATTACHED + run
        saved = self._saved(run, rid, input_ids, params)
        sample = c.ledger.add_attached(name, rid, input_ids, params, saved)
        if saved is not None:
            _restore(sample, tokens_of(saved), saved.samples[0].finished)
        if name not in c.attached:
            c.attached[name] = Round(_spec(name, c.attached_kv), sample.group.run, 0)
        c.trace("attach", [sample])
        c.ledger.admit(sample)
        sample.kv.version = c.clock.version
        sample.open_span(sample.kv.version, "recomputed" if sample.length else "fresh")
        sample.recompute.in_progress = sample.length > 0
        return sample

    def _saved(self, run: str, rid: str, input_ids: bytes, params: bytes) -> SnapshotGroup | None:
        """The same request in the journal, of a server that was killed."""
        saved = self._c.saved_attached.pop((run, rid), None)
        if saved is None:
            return None
        same = (saved.prompt.input_ids, saved.params) == (input_ids, params)
        self._c.recorder.asked_again(saved.gid, same=same)
        return saved if same else None

    def end(self, sample: Sample) -> None:
        """SGLang has answered the request, finished or aborted, or is about to: tell the HTTP process how it was drawn.

        The engine's request stays with SGLang, which may report it again: a request that has ended is ignored.
        """
        c, run = self._c, sample.group.run
        if sample.group.id not in run.groups:
            return
        c.trace("end attached", [sample])
        c.recorder.attached_ended(sample)
        self._tiers.release(sample)
        c.ledger.remove_attached(sample)
        if not run.groups:
            c.attached.pop(run.name, None)
        c.engine.forget(sample)
        rid = sample.group.id.partition(":")[2]
        c.recorder.send(messages.AttachedEnded(rid, sample.closed_spans(), c.clock.version))

    def named(self, wanted: Callable[[Any], bool]) -> list[Sample]:
        """The attached requests whose engine's request is `wanted`."""
        groups = (group for rnd in self._c.attached.values() for group in rnd.run.groups.values())
        return [sample for group in groups for sample in group.samples.values() if wanted(sample.request)]

    def keep_suspended(self) -> None:
        """While samples may not step, neither may requests that have arrived since they were suspended."""
        running = [s for rnd in self._c.attached.values() for s in rnd.run.samples(State.RUNNING)]
        if running:
            self._suspender.suspend_now(running)


def _restore(sample: Sample, tokens: Chunk, answered: FinishedSample | None) -> None:
    marks = sample.journal
    marks.snapshot, marks.admission, marks.answered = tokens, True, answered
    sample.length = marks.tokens = tokens.length
    sample.spans = list(tokens.spans)


def _spec(run: str, kv: messages.KvPolicy) -> messages.RoundSpec:
    return messages.RoundSpec("", run, quota=None, quota_unit="sample", kv=kv, max_staleness=None)
