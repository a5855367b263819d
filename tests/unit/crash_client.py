"""The client of a process that is killed: remembers every message and checks the next epoch against them."""

from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.scheduler.state import sample_seed
from tests.unit.crashing_harness import KEPT
from tests.unit.fake_request import token

RUNS = ("a", "b", "c")
PipeMessage = messages.Command | messages.Event


class CrashClient:
    """Runs in the parent process: remembers every message and compares the next epoch with them."""

    def __init__(self) -> None:
        self.issued: dict[int, messages.Command] = {}
        self.accepted: dict[tuple[str, str], int] = {}
        """(run, id) -> n of every prompt that was accepted."""
        self.gone: set[tuple[str, str]] = set()
        """Dropped."""
        self.delivered: dict[tuple[str, str, int], str] = {}
        """Sample -> the one round whose reply has it."""
        self.open: dict[str, str] = {}
        """Round -> run."""
        self.replies: dict[str, bytes] = {}
        self.order: dict[str, list[str]] = defaultdict(list)
        self.finished: dict[tuple[str, str, int], messages.FinishedSample] = {}
        self.restored = 0

    def observe(self, message: PipeMessage) -> None:
        match message:
            case messages.Answer():
                self._answered(message)
            case messages.Finished():
                self.finished |= {(s.run, s.id, s.index): s for s in message.samples}
            case messages.RoundEnded():
                samples = [self.finished[message.run, d.id, i] for d in message.deliver for i in d.indices]
                self._replied(message, samples)
            case messages.Restored():
                self._restored(message)
            case messages.Named() | messages.JournalFault():
                assert not isinstance(message, messages.JournalFault), message
            case _:
                self.issued[message.seq] = message

    def _answered(self, answer: messages.Answer) -> None:
        assert answer.status == 200, answer
        match self.issued.pop(answer.seq):
            case messages.OpenRound(spec=spec, prompts=prompts):
                self.open[spec.round_id] = spec.run
                self.accepted |= {(spec.run, p.id): p.n for p in prompts}
            case messages.Drop(run=run, ids=ids):
                self.gone |= {(run, i) for i in ids or ()}

    def _replied(self, ended: messages.RoundEnded, samples: list[messages.FinishedSample]) -> None:
        for sample in samples:
            key = sample.run, sample.id, sample.index
            assert key not in self.delivered, f"{key} of {ended.round_id} was delivered by {self.delivered[key]}"
            self.delivered[key] = ended.round_id
            tokens = np.frombuffer(sample.output_ids, "<i4").tolist()
            assert tokens == [token(sample.seed, t) for t in range(len(tokens))]
            assert len(sample.logprobs) == len(sample.output_ids)
            assert (sample.spans[-1].end if sample.spans else 0) == len(tokens)
            assert sample.seed == sample_seed(int(sample.id.split(".")[2]), sample.id, 0, sample.index)
        self.open.pop(ended.round_id, None)
        self.replies[ended.round_id] = _content(ended, samples)
        self.order[ended.run].append(ended.round_id)

    def _restored(self, epoch: messages.Restored) -> None:
        self.restored += 1
        assert not epoch.warnings, epoch.warnings
        before = dict(self.finished)
        self.finished |= {(s.run, s.id, s.index): s for s in epoch.finished}
        unanswered = list(self.issued.values())
        self.issued.clear()
        # A command sent at the moment of the kill may or may not have taken effect.
        rounds = {r.round_id: r.run for r in epoch.rounds} | {r.spec.round_id: r.spec.run for r in epoch.replies}
        for command in unanswered:
            if isinstance(command, messages.OpenRound) and command.spec.round_id in rounds:
                self.open[command.spec.round_id] = command.spec.run
                self.accepted |= {(command.spec.run, p.id): p.n for p in command.prompts}
        there = {(run, prompt.id) for run, prompt in epoch.groups}
        for command in unanswered:
            if isinstance(command, messages.Drop):
                self.gone |= {(command.run, i) for i in command.ids or ()} - there
        self._check_replies(epoch)
        assert {r.round_id for r in epoch.rounds} == set(self.open), "an open round is lost, or one came back"
        assert there == set(self.undelivered()), "a group is lost, or one came back"
        restored = {(s.run, s.id, s.index): _tokens(s) for s in epoch.finished}
        announced = {k: _tokens(s) for k, s in before.items() if k[:2] in there and k not in self.delivered}
        assert announced.items() <= restored.items(), "a sample that was announced is drawn again"

    def _check_replies(self, epoch: messages.Restored) -> None:
        kept = {r.spec.round_id: _content(r.ended, r.samples) for r in epoch.replies}
        for reply in epoch.replies:
            if reply.spec.round_id not in self.replies:
                self._replied(reply.ended, reply.samples)
        assert kept.keys() | set(epoch.gone) == self.replies.keys()
        assert all(self.replies[name] == answer for name, answer in kept.items()), "a reply has changed"
        for order in self.order.values():
            assert not set(order[-KEPT:]) & set(epoch.gone), "a reply is lost"

    def undelivered(self) -> Iterator[tuple[str, str]]:
        for (run, name), n in self.accepted.items():
            if (run, name) not in self.gone and any((run, name, i) not in self.delivered for i in range(n)):
                yield run, name


def _tokens(sample: messages.FinishedSample) -> tuple[bytes, bytes]:
    return sample.output_ids, sample.logprobs


def _content(ended: messages.RoundEnded, samples: list[messages.FinishedSample]) -> bytes:
    # A reply does not show which of two samples that ended in one step completed their group.
    in_order = sorted((msgspec.structs.replace(s, whole=False) for s in samples), key=lambda s: (s.id, s.index))
    return messages.encode(ended) + msgspec.msgpack.encode(in_order)
