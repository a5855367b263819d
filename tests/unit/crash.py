"""A `World` with a journal, whose server dies at any moment and comes back (S8)."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_april import wire
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import starting_version
from sglang_april.store.journal import Journal, OnWritten
from sglang_april.store.saved import Saved
from sglang_april.store.tables import Op
from sglang_april.types import Sample, State
from tests.unit.fake_engine import FakeEngine, build
from tests.unit.fake_loop import token
from tests.unit.recount import samples_of
from tests.unit.world import World

KEPT = 2
"""Replies per run."""


class PromptJournal(Journal):
    """Writes in the moment in which it is told, so that a story can be told step by step."""

    def start(self, written: OnWritten = lambda _last, _error: None) -> None:
        self._written = written

    def put(self, batch: list[Op]) -> int:
        self._put += 1
        assert self._transaction(list(batch)) == ""
        self._written(self._put, "")
        return self._put


class Crashing(World):
    """Rank 0 has the journal, the other replicas have none and must decide the same."""

    def __init__(self, path: Path | str, replicas: int = 1, every: int = 1, **engine: Any) -> None:
        self.path = path
        self.crashes = 0
        super().__init__(replicas, every, **engine)

    def _start(self) -> None:
        super()._start()
        journal = PromptJournal(self.path)
        self.saved = saved = journal.load()
        version, unnamed = starting_version(None, saved.version)
        for e in self.engines:
            context = e.controller.context
            context.clock.version = e.version = version
            context.clock.unnamed = unnamed
            e.controller.restore(msgspec.convert(msgspec.to_builtins(saved), Saved))
            recall_all(e)
        self.recorder = self.controller.context.recorder = Recorder(self.engine, journal, KEPT)

    @staticmethod
    def _same(said: list[bytes], other: list[bytes]) -> bool:
        """With a journal, an answer that stands for itself overtakes what waits to be written."""
        return sorted(said) == sorted(other)

    def close(self) -> None:
        self.recorder.close()

    def crash(self) -> None:
        """Kill the server between two events; what the last step has not put to the journal is lost."""
        before = {_name(s): s for s in samples_of(self.ledger)}
        drawn = {name: list(s.request.drawn_under) for name, s in before.items() if s.request is not None}
        step, lost = self.controller.context.step, bool(self.recorder._records)
        self.recorder._records = []
        self.recorder.close()
        self.crashes += 1
        self._start()
        self.push_open = self.frozen = False
        assert self.controller.context.clock.version == self.version
        self._check_replies(self.saved)
        assert {(run, name): n for run, name, n in self.saved.ids} == dict(self.incarnations)
        after = {_name(s): s for s in samples_of(self.ledger)}
        assert after.keys() == before.keys(), "a sample is lost, or back from the dead"
        for name, sample in after.items():
            self._check(sample, before[name], drawn.get(name), step if lost else -1)
        for run, rnd in self.rounds.items():
            rnd.generated = rnd.reprefilled = 0
            rnd.mandatory.clear()
            self.mark(rnd)
            assert self.controller.context.rounds[run].spec == msgspec.structs.replace(
                rnd.spec, prompts=[], params=[], seq=self.controller.context.rounds[run].spec.seq
            )
        self.end_what_is_over()
        self.check()

    def _check(self, sample: Sample, before: Sample, drawn: list[Any] | None, step: int) -> None:
        group = self.groups[sample.group.run.name, sample.group.id, sample.group.incarnation]
        if before.state is State.FINISHED:
            if sample.state is State.FINISHED:
                assert (sample.order, sample.finish_step) == (before.order, before.finish_step)
                assert (sample.length, sample.closed_spans()) == (before.length, before.closed_spans())
                return
            assert before.finish_step == step, "a finished sample was not written in its step"
            del group.finished[sample.index]
        assert sample.state is (State.SUSPENDED if sample.length else State.QUEUED)
        assert sample.length == before.recorded or step == self.controller.context.step
        assert sample.seed == before.seed
        if drawn is not None:
            assert [(s.version, s.kv) for s in sample.spans for _ in range(s.start, s.end)] == drawn[: sample.length]
        if sample.length:
            assert sample.request.output == [token(sample.seed, t) for t in range(sample.length)]

    def _check_replies(self, saved: Saved) -> None:
        """A kept reply says the same for ever; what is no longer kept is known to be gone."""
        said = [r.round_id for r in self.replies]
        assert sorted([r.spec.round_id for r in saved.replies] + saved.gone) == sorted(said)
        for run in {r.run for r in self.replies}:
            kept = [r for r in saved.replies if r.spec.run == run]
            heard = [r for r in self.replies if r.run == run][-KEPT:]
            assert [wire.encode(r.ended) for r in kept] == [wire.encode(r) for r in heard]
            for reply in kept:
                named = {((run, d.id, d.incarnation), i) for d in reply.ended.deliver for i in d.indices}
                there = {((run, s.id, s.incarnation), s.index): s for s in reply.samples}
                assert there == {key: self.samples[key] for key in named}
                assert [p.id for p in reply.prompts] == [d.id for d in reply.ended.deliver]


def _name(sample: Sample) -> tuple[str, str, int, int]:
    return sample.group.run.name, sample.group.id, sample.group.incarnation, sample.index


def recall_all(engine: FakeEngine) -> None:
    """What the engine makes of restored samples when it first needs them."""
    ledger = engine.controller.context.ledger
    for sample in samples_of(ledger):
        name = f"{sample.group.order}.{sample.index}"
        if sample.order >= 0:
            engine.first_start[name] = sample.order
        if sample.recall is not None:
            assert np.frombuffer(sample.recall.logprobs, "<f4").tolist() == [-1.0] * sample.length
            build(sample)
    engine.starts = ledger._admissions
