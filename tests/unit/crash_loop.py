"""A scheduler without a model in a process of its own, whose journal and files of pages outlive it.

What it does is paced by its journal, not by the clock: it is never more than a few batches ahead of the writer, and
at most the capacity of a pipe ahead of its reader. So kills hit all phases equally, however slow the disk is.
"""

import fcntl
import gc
import os
import random
import signal
import struct
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_april.api import messages
from sglang_april.recovery.journal import Journal, OnFault, OnWritten
from sglang_april.recovery.kv_recovery import KvSearch
from sglang_april.recovery.schema import Op
from sglang_april.scheduler.recorder import Recorder
from sglang_april.scheduler.restore import restored_event, starting_version
from tests.unit.crash_client import RUNS, CrashClient, PipeMessage
from tests.unit.crashing_harness import KEPT, restore_tokens
from tests.unit.recount import recount, samples_of
from tests.unit.storing_engine import StoringEngine, key_of

COMMAND, EVENT = 0, 1
HEAD = struct.Struct("<BI")
PIPE_BYTES = 4096
"""Small, so that an epoch is never far ahead of what the parent has received from it."""
SLOTS, POOL, HOST, DISK = 4, 200, 80, 160
"""Samples, and tokens of each tier: little, so that pages are always on the move."""


class PacedJournal(Journal):
    """Blocks its caller while it is more than this many batches ahead of the writer."""

    def __init__(self, path: Path, ahead: int) -> None:
        super().__init__(path)
        self._ahead, self._done, self._told = ahead, 0, threading.Condition()

    def start(self, written: OnWritten = lambda _last, _failed: None, fault: OnFault = lambda _error: None) -> None:
        def on_stored(last: int, failed: Mapping[int, str]) -> None:
            written(last, failed)
            with self._told:
                self._done = last
                self._told.notify()

        super().start(on_stored, fault)

    def put(self, batch: Sequence[Op]) -> int:
        number = super().put(batch)
        with self._told:
            self._told.wait_for(lambda: self._done >= number - self._ahead)
        return number


class CrashLoop:
    """The child: random commands of a client, and the scheduler's events; it writes both to a pipe."""

    caps: Mapping[str, int] = {"pool": POOL, "host_cap": HOST, "disk_cap": DISK}
    tiers: Sequence[messages.Tier] = ("auto", "device", "host", "disk", "none")

    def __init__(self, folder: Path, pipe: int, seed: int) -> None:
        self.rng, self.pipe, self.seed = random.Random(seed), pipe, seed
        self.seq, self.lock = 0, threading.Lock()
        self.busy: set[str] = set()
        """Runs whose round is open, as far as the client has been informed."""
        self.engine = StoringEngine(folder, slots=SLOTS, overlap=seed % 2 == 0, **self.caps)
        self.engine.on_event = self.publish
        journal = PacedJournal(folder / "journal", ahead=self.rng.choice((0, 1, 4)))
        saved = journal.load()
        version, unnamed = starting_version(None, saved.version)
        self.context = self.engine.controller.context
        self.context.clock.version = self.engine.version = version
        self.context.clock.unnamed = unnamed
        search = KvSearch(self.engine.disk, saved.epoch)
        self.engine.controller.restore(saved, lambda wanted: search.find_all([(key_of(s), kv) for s, kv in wanted]))
        restore_tokens(self.engine)
        recount(self.engine, self.context.ledger)
        back = [key_of(s) for s in samples_of(self.context.ledger) if s.kv.pages is not None]
        self.engine.disk.begin(saved.next_epoch, back)
        with (folder / "recovered").open("a") as out:
            out.writelines(f"{key}\n" for key in back)
        self.busy |= {r.spec.run for r in saved.rounds}
        self.replies = [(r.spec.run, r.spec.round_id) for r in saved.replies]
        self.engine.send(restored_event(saved, unnamed=unnamed))
        self.recorder = self.context.recorder = Recorder(self.engine, journal, self.rng.choice((4, 256)))
        self.recorder.epoch(saved.next_epoch)
        self.recorder.commit()

    def publish(self, message: PipeMessage) -> None:
        """Write one message; the journal's thread calls this too."""
        if isinstance(message, messages.RoundEnded):
            self.busy.discard(message.run)
            self.replies.append((message.run, message.round_id))
        body = messages.encode(message)
        kind = EVENT if isinstance(message, messages.Event) else COMMAND
        with self.lock:
            os.write(self.pipe, HEAD.pack(kind, len(body)) + body)

    def issue(self, kind: type[Any], **fields: Any) -> None:
        self.seq += 1
        command = kind(seq=self.seq, **fields)
        self.publish(command)
        self.engine.controller.command(command)

    def open(self, run: str, count: int, quota: int | None) -> None:
        self.busy.add(run)
        sizes = [self.rng.choice((1, 6, 30)) for _ in range(count)]
        prompts = [messages.Prompt(f"{self.seed}.{self.seq}.{i}", bytes(12), 2, i, i) for i in range(count)]
        params = list(map(msgspec.msgpack.encode, sizes))
        held = self.rng.random() < 0.1
        name = f"{run}.{self.seed}.{self.seq}"
        self.issue(
            messages.OpenRound,
            spec=self.spec(
                round_id=name,
                run=run,
                quota=quota,
                quota_unit=self.rng.choice(("group", "group", "sample")),
                kv="keep",
                max_staleness=5,
                keep_until_ack=held,
                tier=self.rng.choice(self.tiers),
            ),
            prompts=prompts,
            params=params,
        )
        if held:
            self.issue(messages.Acknowledge, round_id=name)

    def delete_replies(self, run: str) -> None:
        """All but the last few of a run, as the HTTP process decides."""
        for reply in [reply for reply in list(self.replies) if reply[0] == run][:-KEPT]:
            self.replies.remove(reply)
            self.issue(messages.DeleteReply, round_id=reply[1])

    def spec(self, **fields: Any) -> messages.RoundSpec:
        return messages.RoundSpec(**fields)

    def name_the_version(self) -> None:
        if self.context.clock.closed:
            self.issue(messages.PushBegin)
            self.issue(messages.PushEnd)

    def live(self) -> None:
        """Run until the process is killed."""
        self.name_the_version()
        while True:
            self.turn()
            if self.rng.random() < 0.1:
                self.disturb()

    def turn(self) -> None:
        """Delete old replies and open a round at times, and take some steps."""
        if self.rng.random() < 0.3:
            self.delete_replies(self.rng.choice(RUNS))
        idle = [run for run in RUNS if run not in self.busy]
        if idle and self.rng.random() < 0.5:
            self.open(self.rng.choice(idle), self.rng.randint(0, 3), self.rng.choice((1, 1, 2, None)))
        for _ in range(self.rng.randint(1, 3)):
            self.engine.step()

    def disturb(self) -> None:
        match self.rng.randrange(4):
            case 0:
                self.issue(messages.PushBegin)
                self.issue(messages.PushEnd)
            case 1 if self.context.rounds:
                rnd = self.rng.choice(list(self.context.rounds.values()))
                self.issue(messages.StopRound, round_id=rnd.spec.round_id)
            case 2:
                run = self.context.ledger.run(self.rng.choice(RUNS))
                if run.groups:
                    self.issue(messages.Drop, run=run.name, ids=[self.rng.choice(list(run.groups))])
            case 3:
                self.engine.flush()

    def finish(self) -> None:
        """Deliver everything and close the journal."""
        self.name_the_version()
        runs = self.context.ledger.runs
        while self.context.rounds or any(run.groups for run in runs.values()):
            for run in (r for r in RUNS if r not in self.busy and self.context.ledger.run(r).groups):
                self.open(run, 0, None)
            for rnd in [r for r in self.context.rounds.values() if r.spec.quota is not None or r.judged]:
                self.issue(messages.StopRound, round_id=rnd.spec.round_id)
            self.engine.step()
        self.recorder.close()


def messages_of(pipe: int) -> Iterator[PipeMessage]:
    """The messages of an epoch; one that its end cut off does not count."""
    data = b""
    while True:
        while len(data) >= HEAD.size:
            kind, size = HEAD.unpack_from(data)
            if len(data) < HEAD.size + size:
                break
            body, data = data[HEAD.size : HEAD.size + size], data[HEAD.size + size :]
            yield messages.decode_event(body) if kind == EVENT else messages.decode_message(body)
        more = os.read(pipe, 1 << 16)
        if not more:
            return
        data += more


def one_epoch(folder: Path, client: CrashClient, seed: int, last_word: int | None) -> int:
    """Fork an epoch, receive that many messages (None: until it ends), kill it; returns the number received."""

    def live(pipe: int) -> None:
        epoch = CrashLoop(folder, pipe, seed)
        if last_word is None:
            epoch.finish()
        else:
            epoch.live()

    received, status = forked(live, client, last_word)
    assert status == (0 if last_word is None else -signal.SIGKILL), f"epoch {seed} ended by itself: {status}"
    return received


def forked(live: Callable[[int], None], client: CrashClient, last_word: int | None = None) -> tuple[int, int]:
    """Fork `live(pipe)` and receive that many messages, or all; returns their number and the exit status."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    gc.freeze()  # a collection in the child would copy the parent's pages
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            live(write)
            status = 0
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    received = 0
    try:
        for message in messages_of(read):
            client.observe(message)
            received += 1
            if received == last_word:
                os.kill(child, signal.SIGKILL)
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return received, status
