"""The channels of one TP rank to the others (`rank-determinism`).

Rank 0's scheduler socket is connected to a second address. Messages sent there are received and broadcast over the
TP group together with those of the HTTP process, and wake a scheduler that sleeps. Ranks report ends of copies to a
thread of rank 0, which sends one message when all have reported. Each rank also sends a digest of its decisions to the
next rank, which compares them with its own.
"""

import threading
from typing import Any

import torch
import zmq
from sglang.srt.managers.io_struct import sock_send
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.utils.network import get_local_ip_auto

from sglang_april.adapter.core.envelope import AprilReq
from sglang_april.adapter.rank_channel import Body, Copied, Inbox, Sender, new_secret
from sglang_april.adapter.shapes.installed import shape
from sglang_april.api import messages
from sglang_april.scheduler.decisions import MAX_TEXT, Decided, PeerComparison

_TO_SCHEDULER = "inproc://april-observations"


class Rank0Broadcast:
    """One rank's endpoint. Its methods may be called from any thread."""

    def __init__(self, s: Scheduler) -> None:
        self._ranks, self._rank = shape.tp_size(s), shape.tp_rank(s)
        self._lock = threading.Lock()
        self._to_scheduler: zmq.Socket[bytes] | None = None
        self._failures_by_transfer: dict[int, dict[int, str]] = {}
        if self._rank == 0:
            inbox = s.ipc_channels.recv_from_tokenizer
            self._to_scheduler = inbox.context.socket(zmq.PUSH)
            self._to_scheduler.bind(_TO_SCHEDULER)
            inbox.connect(_TO_SCHEDULER)
        if self._ranks > 1:
            self._join(s)

    def send(self, observation: messages.Observation) -> None:
        """Broadcast an observation of rank 0. On other ranks this does nothing."""
        if self._to_scheduler is not None:
            with self._lock:
                sock_send(self._to_scheduler, AprilReq(payload=messages.encode(observation)))

    def report(self, move: int, failure: str = "") -> None:
        """Report a completed or failed copy. Once all ranks have reported, `messages.Moved` is broadcast."""
        if self._ranks == 1:
            self.send(_moved({move: {0: failure}}))
        else:
            self._to_rank_0.send(Copied(move, failure[:MAX_TEXT]))

    def compare(self, step: int, decided: Decided | None) -> None:
        """Compare this rank's decisions with those of the others, before the forward of the step is launched.

        Raises:
            RanksDifferError: they differ; the thread that receives reports raises it too (`fail-stop`).
        """
        if decided is not None:
            self._to_next.send(decided)
        self._comparison.launched(step, decided)

    def _join(self, s: Scheduler) -> None:
        """Connect the ranks. A collective call during the start."""
        inbox = Inbox(self._rank, get_local_ip_auto() if shape.resolved(s.server_args).nnodes > 1 else None)
        gathered: list[Any] = [None] * self._ranks
        mine = (inbox.address, new_secret() if self._rank == 0 else b"")
        torch.distributed.all_gather_object(gathered, mine, group=s.tp_cpu_group)
        addresses, secret = [address for address, _ in gathered], gathered[0][1]
        following, before = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        to = {receiver: Sender(self._rank, receiver, addresses[receiver], secret) for receiver in (0, following)}
        self._to_rank_0, self._to_next = to[0], to[following]
        self._comparison = PeerComparison(self._rank, before)
        inbox.read(secret, self._received)

    def _received(self, sender: int, body: Body) -> None:
        if isinstance(body, Decided):
            self._comparison.received(body)
        elif self._rank == 0:
            failures = self._failures_by_transfer.setdefault(body.order, {})
            failures[sender] = f"rank {sender}: {body.failure}" if body.failure else ""
            if len(failures) == self._ranks:
                self.send(_moved({body.order: self._failures_by_transfer.pop(body.order)}))


def _moved(failures_by_transfer: dict[int, dict[int, str]]) -> messages.Moved:
    """Ready = all ranks, failed = any rank."""
    failed = {
        transfer: next(f for _, f in sorted(failures.items()) if f)
        for transfer, failures in failures_by_transfer.items()
        if any(failures.values())
    }
    return messages.Moved([transfer for transfer in failures_by_transfer if transfer not in failed], failed)
