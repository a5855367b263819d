"""A scheduler without a model in a process of its own, whose journal outlives it, and the client who remembers (S8)."""

import fcntl
import os
import random
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_april import wire
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import starting_version
from sglang_april.store.journal import Journal
from sglang_april.store.saved import restored_event
from sglang_april.types import sample_seed
from tests.unit.crash import KEPT, recall_all
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_loop import token

RUNS = ("a", "b", "c")
COMMAND, EVENT = 0, 1
HEAD = struct.Struct("<BI")
PIPE_BYTES = 4096
"""So little that a life is never far ahead of what has been heard of it."""

Word = wire.Command | wire.Event


class Life:
    """The child: a client's commands, at random, and what the scheduler says, as words in a pipe."""

    def __init__(self, path: Path, pipe: int, seed: int) -> None:
        self.rng, self.pipe, self.seed = random.Random(seed), pipe, seed
        self.seq, self.lock = 0, threading.Lock()
        self.busy: set[str] = set()
        """Runs whose round is open, as far as the client has heard."""
        self.engine = FakeEngine(slots=4, pool=200, overlap=seed % 2 == 0)
        self.engine.on_event = self.say
        journal = Journal(path)
        saved = journal.load()
        version, unnamed = starting_version(None, saved.version)
        self.context = self.engine.controller.context
        self.context.clock.version = self.engine.version = version
        self.context.clock.unnamed = unnamed
        self.engine.controller.restore(saved)
        recall_all(self.engine)
        self.busy |= {r.spec.run for r in saved.rounds}
        self.engine.send(restored_event(saved, unnamed=unnamed))
        self.recorder = self.context.recorder = Recorder(self.engine, journal, KEPT)

    def say(self, word: Word) -> None:
        """One word at a time; the journal's thread speaks too."""
        if isinstance(word, wire.RoundEnded):
            self.busy.discard(word.run)
        body = wire.encode(word)
        kind = EVENT if isinstance(word, wire.Event) else COMMAND
        with self.lock:
            os.write(self.pipe, HEAD.pack(kind, len(body)) + body)

    def ask(self, kind: type[Any], **fields: Any) -> None:
        self.seq += 1
        command = kind(seq=self.seq, **fields)
        self.say(command)
        self.engine.controller.command(command)

    def open(self, run: str, count: int, quota: int | None) -> None:
        self.busy.add(run)
        sizes = [self.rng.choice((1, 6, 30)) for _ in range(count)]
        prompts = [wire.Prompt(f"{self.seed}.{self.seq}.{i}", bytes(12), 2, i, i) for i in range(count)]
        params = list(map(msgspec.msgpack.encode, sizes))
        held = self.rng.random() < 0.1
        name = f"{run}.{self.seed}.{self.seq}"
        self.ask(
            wire.OpenRound,
            round_id=name,
            run=run,
            prompts=prompts,
            params=params,
            quota=quota,
            unit=self.rng.choice(("group", "group", "sample")),
            kv="keep",
            max_staleness=5,
            keep_until_ack=held,
        )
        if held:
            self.ask(wire.Acknowledge, round_id=name, run=run)

    def name_the_version(self) -> None:
        if self.context.clock.closed:
            self.ask(wire.PushBegin)
            self.ask(wire.PushEnd)

    def live(self) -> None:
        """Until somebody ends it."""
        self.name_the_version()
        while True:
            idle = [run for run in RUNS if run not in self.busy]
            if idle and self.rng.random() < 0.5:
                self.open(self.rng.choice(idle), self.rng.randint(0, 3), self.rng.choice((1, 1, 2, None)))
            for _ in range(self.rng.randint(1, 3)):
                self.engine.step()
            if self.rng.random() < 0.1:
                self.disturb()

    def disturb(self) -> None:
        match self.rng.randrange(4):
            case 0:
                self.ask(wire.PushBegin)
                self.ask(wire.PushEnd)
            case 1 if self.context.rounds:
                rnd = self.rng.choice(list(self.context.rounds.values()))
                self.ask(wire.StopRound, round_id=rnd.spec.round_id)
            case 2:
                run = self.context.ledger.run(self.rng.choice(RUNS))
                if run.groups:
                    self.ask(wire.Drop, run=run.name, ids=[self.rng.choice(list(run.groups))])
            case 3:
                self.engine.flush()

    def finish(self) -> None:
        """Deliver everything, and end in good order."""
        self.name_the_version()
        runs = self.context.ledger.runs
        while self.context.rounds or any(run.groups for run in runs.values()):
            for run in (r for r in RUNS if r not in self.busy and self.context.ledger.run(r).groups):
                self.open(run, 0, None)
            for rnd in [r for r in self.context.rounds.values() if r.spec.quota is not None]:
                self.ask(wire.StopRound, round_id=rnd.spec.round_id)
            self.engine.step()
        self.recorder.close()


class Client:
    """The parent: remembers every word, and compares the next life with it."""

    def __init__(self) -> None:
        self.asked: dict[int, wire.Command] = {}
        self.accepted: dict[tuple[str, str], int] = {}
        """(run, id) -> n of every prompt that was accepted."""
        self.gone: set[tuple[str, str]] = set()
        """Dropped."""
        self.delivered: dict[tuple[str, str, int], str] = {}
        """Sample -> the one round whose reply has it."""
        self.open: dict[str, str] = {}
        """Round -> run."""
        self.replies: dict[str, bytes] = {}
        self.order: dict[str, list[str]] = {run: [] for run in RUNS}
        self.finished: dict[tuple[str, str, int], wire.FinishedSample] = {}
        self.restored = 0

    def hear(self, word: Word) -> None:
        match word:
            case wire.Answer():
                self._answered(word)
            case wire.Finished():
                self.finished |= {(s.run, s.id, s.index): s for s in word.samples}
            case wire.RoundEnded():
                samples = [self.finished[word.run, d.id, i] for d in word.deliver for i in d.indices]
                self._replied(word, samples)
            case wire.Restored():
                self._restored(word)
            case wire.Named() | wire.JournalFault():
                assert not isinstance(word, wire.JournalFault), word
            case _:
                self.asked[word.seq] = word

    def _answered(self, answer: wire.Answer) -> None:
        assert answer.status == 200, answer
        match self.asked.pop(answer.seq):
            case wire.OpenRound(round_id=name, run=run, prompts=prompts):
                self.open[name] = run
                self.accepted |= {(run, p.id): p.n for p in prompts}
            case wire.Drop(run=run, ids=ids):
                self.gone |= {(run, i) for i in ids or ()}

    def _replied(self, ended: wire.RoundEnded, samples: list[wire.FinishedSample]) -> None:
        for sample in samples:
            key = sample.run, sample.id, sample.index
            assert key not in self.delivered, f"{key} of {ended.round_id} was delivered by {self.delivered[key]}"
            self.delivered[key] = ended.round_id
            tokens = np.frombuffer(sample.output_ids, "<i4").tolist()
            assert tokens == [token(sample.seed, t) for t in range(len(tokens))]
            assert len(sample.logprobs) == len(sample.output_ids)
            assert sample.spans[-1].end == len(tokens)
            assert sample.seed == sample_seed(int(sample.id.split(".")[2]), sample.id, 0, sample.index)
        self.open.pop(ended.round_id, None)
        self.replies[ended.round_id] = _content(ended, samples)
        self.order[ended.run].append(ended.round_id)

    def _restored(self, life: wire.Restored) -> None:
        self.restored += 1
        assert not life.warnings, life.warnings
        self.finished |= {(s.run, s.id, s.index): s for s in life.finished}
        unanswered = list(self.asked.values())
        self.asked.clear()
        # What was asked in the moment of death may or may not have come to pass.
        rounds = {r.round_id: r.run for r in life.rounds} | {spec.round_id: spec.run for spec, *_ in life.replies}
        for command in unanswered:
            if isinstance(command, wire.OpenRound) and command.round_id in rounds:
                self.open[command.round_id] = command.run
                self.accepted |= {(command.run, p.id): p.n for p in command.prompts}
        there = {(run, prompt.id) for run, prompt in life.groups}
        for command in unanswered:
            if isinstance(command, wire.Drop):
                self.gone |= {(command.run, i) for i in command.ids or ()} - there
        self._check_replies(life)
        assert {r.round_id for r in life.rounds} == set(self.open), "an open round is lost, or one came back"
        assert there == set(self.undelivered()), "a group is lost, or one came back"

    def _check_replies(self, life: wire.Restored) -> None:
        kept = {spec.round_id: _content(ended, samples) for spec, ended, _, samples in life.replies}
        for spec, ended, _, samples in life.replies:
            if spec.round_id not in self.replies:
                self._replied(ended, samples)
        assert kept.keys() | set(life.gone) == self.replies.keys()
        assert all(self.replies[name] == said for name, said in kept.items()), "a reply has changed"
        for order in self.order.values():
            assert not set(order[-KEPT:]) & set(life.gone), "a reply is lost"

    def undelivered(self) -> Iterator[tuple[str, str]]:
        for (run, name), n in self.accepted.items():
            if (run, name) not in self.gone and any((run, name, i) not in self.delivered for i in range(n)):
                yield run, name


def _content(ended: wire.RoundEnded, samples: list[wire.FinishedSample]) -> bytes:
    # Which of two that ended in one step completed their group is nothing that a reply says.
    in_order = sorted((msgspec.structs.replace(s, whole=False) for s in samples), key=lambda s: (s.id, s.index))
    return wire.encode(ended) + msgspec.msgpack.encode(in_order)


def words(pipe: int) -> Iterator[Word]:
    """What a life says; a word that was cut off by its end was never said."""
    data = b""
    while True:
        while len(data) >= HEAD.size:
            kind, size = HEAD.unpack_from(data)
            if len(data) < HEAD.size + size:
                break
            body, data = data[HEAD.size : HEAD.size + size], data[HEAD.size + size :]
            yield wire.decode_event(body) if kind == EVENT else wire.decode_message(body)
        more = os.read(pipe, 1 << 16)
        if not more:
            return
        data += more


def one_life(path: Path, client: Client, seed: int, last_word: int | None) -> int:
    """Fork a life, listen to so many words (None: to its good end), kill it; returns how many words were heard."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            life = Life(path, write, seed)
            if last_word is None:
                life.finish()
            else:
                life.live()
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    heard = 0
    try:
        for word in words(read):
            client.hear(word)
            heard += 1
            if heard == last_word:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (0 if last_word is None else -signal.SIGKILL), f"life {seed} ended by itself: {status}"
    return heard
