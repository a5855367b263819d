"""A `ControllerHarness` with a journal, whose server is killed and restarted at any moment."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.kv.kv_pages import StoredKv
from sglang_april.recovery.journal import Journal, OnFault, OnWritten
from sglang_april.recovery.journal_snapshot import JournalSnapshot
from sglang_april.recovery.kv_recovery import KvSearch, Outcome, combine_outcomes
from sglang_april.recovery.schema import Op
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import starting_version
from sglang_april.scheduler.state import Sample, State
from tests.unit.controller_harness import ControllerHarness
from tests.unit.fake_copies import Folder, SampleKey
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import build, sample_key, token
from tests.unit.recount import samples_of

KEPT = 2
"""Replies per run."""


class PromptJournal(Journal):
    """Writes synchronously, so that tests are deterministic."""

    def start(self, written: OnWritten = lambda _last, _failed: None, fault: OnFault = lambda _error: None) -> None:
        self._written = written

    def put(self, batch: list[Op]) -> int:
        self._put += 1
        assert self._transaction(list(batch)) == ""
        self._written(self._put, {})
        return self._put


class CrashingHarness(ControllerHarness):
    """Rank 0 has the journal; the other replicas have none and must decide alike."""

    def __init__(self, path: Path | str, replicas: int = 1, every: int = 1, interval: int = 256, **engine: Any) -> None:
        self.path, self.interval = path, interval
        self.crashes = 0
        self.deleted: set[str] = set()
        """Rounds whose replies are no longer kept."""
        self.folders = [Folder() for _ in range(replicas)]
        """The disk tier's directories, one per rank."""
        self.disk_cap = engine.get("disk_cap", 0)
        self.histories: dict[SampleKey, list[Any]] = {}
        """History of each sample's tokens, up to its end or the last crash."""
        self.recovered = 0
        """Partials that had their KV again, over all restarts."""
        super().__init__(replicas, every, **engine)

    def _start(self) -> None:
        super()._start()
        journal = PromptJournal(self.path)
        self.saved = saved = journal.load()
        version, unnamed = starting_version(None, saved.version)
        if self.kind.get("disk_cap"):
            for e, folder in zip(self.engines, self.folders, strict=True):
                e.copies.folder = folder
        for e in self.engines:
            e.epoch = self.crashes
            context = e.controller.context
            context.clock.version = e.version = version
            context.clock.unnamed = unnamed
            e.controller.restore(msgspec.convert(msgspec.to_builtins(saved), JournalSnapshot), self._find_kv)
            restore_tokens(e, self.histories)
        self._begin(saved.next_epoch)
        self.recorder = self.controller.context.recorder = Recorder(self.engine, journal, self.interval)
        self.recorder.epoch(saved.next_epoch)
        self.recorder.commit()

    def _find_kv(self, wanted: Sequence[tuple[Sample, StoredKv]]) -> list[Outcome]:
        requested = [(sample_key(sample), kv) for sample, kv in wanted]
        return combine_outcomes([KvSearch(e.copies.folder, self.saved.epoch).find_all(requested) for e in self.engines])

    def _begin(self, epoch: str) -> None:
        for e in self.engines:
            back = [s for s in samples_of(e.controller.context.ledger) if s.kv.pages is not None]
            e.copies.folder.begin(epoch, [sample_key(s) for s in back])
        self.recovered += len(back)

    @staticmethod
    def _same(sent: list[bytes], other: list[bytes]) -> bool:
        """With a journal, an answer that needs no record overtakes events that wait for one. Only rank 0 has it."""
        return sorted(map(_without_journal, sent)) == sorted(map(_without_journal, other))

    def delete_replies(self, run: str) -> None:
        """All but the last few of a run, as the HTTP process decides."""
        for reply in [r for r in self.replies if r.run == run][:-KEPT]:
            if reply.round_id not in self.deleted:
                self.deleted.add(reply.round_id)
                self.command(messages.DeleteReply, round_id=reply.round_id)

    def close(self) -> None:
        self.recorder.close()

    def _finished(self, s: messages.FinishedSample) -> None:
        name = s.run, s.id, s.incarnation, s.index
        self.histories[name] = self.engine.ended[name].history
        super()._finished(s)

    def crash(self, *, disk: bool = True) -> None:
        """Kill the server between two events; what the last step has not put to the journal is lost.

        `disk`: whether the next epoch has the disk tier.
        """
        before = {sample_key(s): s for s in samples_of(self.ledger)}
        self.histories |= {name: s.request.history for name, s in before.items() if s.request is not None}
        drawn = {name: list(s.request.drawn_under) for name, s in before.items() if s.request is not None}
        step, lost = self.controller.context.step, bool(self.recorder._records)
        self.recorder._records = []
        self.recorder.close()
        self.crashes += 1
        usable = self._usable() if disk and self.kind.get("disk_cap") else {}
        self.kind["disk_cap"] = self.disk_cap if disk else 0
        self._start()
        self._check_kv(usable)
        self.push_open = self.frozen = False
        assert self.controller.context.clock.version == self.version
        self._check_replies(self.saved)
        assert {(run, name): n for run, name, n in self.saved.ids} == dict(self.incarnations)
        after = {sample_key(s): s for s in samples_of(self.ledger)}
        assert after.keys() == before.keys(), "a sample is lost or restored after its delivery"
        for name, sample in after.items():
            self._check(sample, before[name], drawn.get(name), step if lost else -1)
        self.ahead.clear()  # after a restart nothing runs ahead until a round is opened, and its metrics are lost
        for run, rnd in self.rounds.items():
            rnd.generated = rnd.reprefilled = 0
            rnd.before = None
            rnd.mandatory.clear()
            self.mark(rnd)
            assert self.controller.context.rounds[run].spec == rnd.spec
        self.end_due_rounds()
        self.check()

    def _check(self, sample: Sample, before: Sample, drawn: list[Any] | None, step: int) -> None:
        group = self.groups[sample.group.run.name, sample.group.id, sample.group.incarnation]
        if before.state is State.FINISHED:
            if sample.state is State.FINISHED:
                assert (sample.queue_position, sample.finish_step) == (before.queue_position, before.finish_step)
                assert (sample.length, sample.closed_spans()) == (before.length, before.closed_spans())
                return
            assert before.finish_step == step, "a finished sample was not written in its step"
            del group.finished[sample.index]
        assert sample.state is (State.SUSPENDED if sample.length else State.QUEUED)
        assert sample.length == before.journal.tokens or step == self.controller.context.step
        assert sample.seed == before.seed
        if drawn is not None:
            assert [(s.version, s.kv) for s in sample.spans for _ in range(s.start, s.end)] == drawn[: sample.length]
        if sample.length:
            assert sample.request.output == [token(sample.seed, t) for t in range(sample.length)]

    def _usable(self) -> dict[SampleKey, int]:
        """Samples with a sound file on every rank and their tokens in it, by what is there and not by its header."""
        names = set.intersection(*(set(folder.files) for folder in self.folders)) & self.histories.keys()
        usable = {}
        for name in names:
            files = [folder.files[name] for folder in self.folders]
            tokens = len(files[0].history)
            if all(file.sound and file.history == self.histories[name][:tokens] for file in files):
                usable[name] = tokens
        return usable

    def _check_kv(self, usable: dict[SampleKey, int]) -> None:
        """KV is restored for exactly the journal's tokens, and for all samples with such files that fit the budget."""
        partials = [s for s in samples_of(self.ledger) if s.state is State.SUSPENDED]
        for sample in (s for s in partials if s.kv.pages is not None):
            for file in (e.copies.folder.files[sample_key(sample)] for e in self.engines):
                assert file.sound
                assert file.history == sample.request.history, "KV of other tokens"
        due = [s for s in partials if usable.get(sample_key(s)) == s.length]
        if sum(s.request.prompt + s.length - 1 for s in due) <= self.kind.get("disk_cap", 0):
            assert all(s.kv.pages is not None for s in due), "KV that was there is not used"

    def _check_replies(self, saved: JournalSnapshot) -> None:
        """A kept reply never changes; the ids of replies that are no longer kept are known."""
        assert sorted(saved.gone) == sorted(self.deleted)
        for run in {r.run for r in self.replies}:
            kept = [r for r in saved.replies if r.spec.run == run]
            received = [r for r in self.replies if r.run == run and r.round_id not in self.deleted]
            assert [messages.encode(r.ended) for r in kept] == [messages.encode(r) for r in received]
            for reply in kept:
                named = {((run, d.id, d.incarnation), i) for d in reply.ended.deliver for i in d.indices}
                there = {((run, s.id, s.incarnation), s.index): s for s in reply.samples}
                assert there == {key: self.samples[key] for key in named}
                assert [p.id for p in reply.prompts] == [d.id for d in reply.ended.deliver]


def restore_tokens(engine: FakeEngine, histories: Mapping[SampleKey, list[Any]] | None = None) -> None:
    """Builds requests of restored samples when the engine first needs them, and records their tokens."""
    ledger = engine.controller.context.ledger
    for sample in samples_of(ledger):
        name = f"{sample.group.gid}.{sample.index}"
        if sample.queue_position >= 0:
            engine.first_start[name] = sample.queue_position
        if sample.journal.snapshot is not None:
            assert np.frombuffer(sample.journal.snapshot.logprobs, "<f4").tolist() == [-1.0] * sample.length
            request = build(sample)
            history = histories[sample_key(sample)] if histories is not None else [(0, None)] * sample.length
            request.epochs = [epoch for epoch, _ in history][: sample.length]
    engine.starts = ledger._admissions


def _without_journal(sent: bytes) -> bytes:
    event = messages.decode_event(sent)
    if isinstance(event, messages.Answer):
        event.data.pop("journal", None)
    return messages.encode(event)
