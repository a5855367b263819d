"""Broadcasts local observations from rank 0, so that they take effect on all ranks alike (`rank-determinism`).

Rank 0's scheduler socket is connected to a second address. Messages sent there are received and broadcast over the
TP group together with those of the HTTP process, and wake a scheduler that sleeps. Ranks report to a thread of rank 0,
which sends one message when all have reported.
"""

import contextlib
import shutil
import tempfile
import threading
import weakref
from typing import Any

import torch
import zmq
from msgspec import msgpack
from sglang.srt.managers.io_struct import sock_send
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.utils.network import get_local_ip_auto

from sglang_april.adapter.v0_5_17.envelope import AprilReq
from sglang_april.api import messages

_TO_SCHEDULER = "inproc://april-facts"


class Rank0Broadcast:
    """One rank's endpoint. Its methods may be called from any thread."""

    def __init__(self, s: Scheduler) -> None:
        self._ranks, self._rank = s.ps.tp_size, s.ps.tp_rank
        self._lock = threading.Lock()
        self._to_scheduler: zmq.Socket[bytes] | None = None
        if self._rank == 0:
            inbox = s.ipc_channels.recv_from_tokenizer
            self._to_scheduler = inbox.context.socket(zmq.PUSH)
            self._to_scheduler.bind(_TO_SCHEDULER)
            inbox.connect(_TO_SCHEDULER)
        self._to_rank_0 = self._join(s) if self._ranks > 1 else None

    def send(self, fact: messages.Fact) -> None:
        """Broadcast an observation of rank 0. On other ranks this does nothing."""
        if self._to_scheduler is not None:
            with self._lock:
                sock_send(self._to_scheduler, AprilReq(payload=messages.encode(fact)))

    def report(self, move: int, failure: str = "") -> None:
        """Report a completed or failed copy. Once all ranks have reported, `messages.Moved` is broadcast."""
        if self._to_rank_0 is None:
            self.send(_moved({move: [failure]}))
        else:
            with self._lock:
                self._to_rank_0.send(msgpack.encode((move, f"rank {self._rank}: {failure}" if failure else "")))

    def _join(self, s: Scheduler) -> "zmq.Socket[bytes]":
        """Connect this rank to a socket of rank 0. A collective call during the start."""
        address = [""]
        if self._rank == 0:
            inbox: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
            address = [_bind(inbox, across_nodes=s.server_args.nnodes > 1)]
            threading.Thread(target=self._collect, args=(inbox,), name="april-facts", daemon=True).start()
        torch.distributed.broadcast_object_list(address, src=s.tp_group.ranks[0], group=s.tp_cpu_group)
        to_rank_0: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        to_rank_0.connect(address[0])
        return to_rank_0

    def _collect(self, inbox: "zmq.Socket[bytes]") -> None:
        failures_by_move: dict[int, list[str]] = {}
        while True:
            move, failure = msgpack.decode(inbox.recv())
            failures_by_move.setdefault(move, []).append(failure)
            if len(failures_by_move[move]) == self._ranks:
                self.send(_moved({move: failures_by_move.pop(move)}))


def _moved(failures_by_move: dict[int, list[str]]) -> messages.Moved:
    """Ready = all ranks, failed = any rank."""
    failed = {move: next(f for f in failures if f) for move, failures in failures_by_move.items() if any(failures)}
    return messages.Moved([move for move in failures_by_move if move not in failed], failed)


def _bind(inbox: Any, *, across_nodes: bool) -> str:
    if across_nodes:
        host = get_local_ip_auto()
        return f"tcp://{host}:{inbox.bind_to_random_port(f'tcp://{host}')}"
    folder = tempfile.mkdtemp(prefix="april-")
    weakref.finalize(inbox, _remove, folder)
    inbox.bind(f"ipc://{folder}/facts")
    return f"ipc://{folder}/facts"


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
