"""Observations of ranks reach the scheduler's inbox once all ranks have reported, as failed if one rank failed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from sglang.srt.managers.io_struct import sock_recv

from sglang_april.adapter.v0_5_17.rank0_broadcast import Rank0Broadcast
from sglang_april.api import messages

TIMEOUT_S = 60.0


class Scheduler(SimpleNamespace):
    """The attributes of a scheduler that Rank0Broadcast uses."""

    def __init__(self, rank: int, ranks: int) -> None:
        inbox: Any = zmq.Context.instance().socket(zmq.PULL) if rank == 0 else None
        super().__init__(
            ps=SimpleNamespace(tp_rank=rank, tp_size=ranks),
            ipc_channels=SimpleNamespace(recv_from_tokenizer=inbox),
            server_args=SimpleNamespace(nnodes=1),
            tp_group=SimpleNamespace(ranks=list(range(ranks))),
            tp_cpu_group=None,
        )

    def received(self) -> Any:
        """The next message in the inbox that rank 0 pulls and broadcasts."""
        inbox = self.ipc_channels.recv_from_tokenizer
        assert inbox.poll(TIMEOUT_S * 1000)
        return messages.decode_message(sock_recv(inbox).payload)


@pytest.fixture
def own_context(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sockets of this test alone."""
    context: zmq.Context[Any] = zmq.Context()
    monkeypatch.setattr(zmq.Context, "instance", lambda: context)
    return context


@pytest.mark.usefixtures("own_context")
def test_single_rank_reports_are_sent_at_once() -> None:
    s = Scheduler(0, 1)
    broadcast = Rank0Broadcast(s)  # type: ignore[arg-type]
    broadcast.report(3)
    broadcast.report(4, "disk full")
    assert s.received() == messages.Moved([3])
    assert s.received() == messages.Moved([], {4: "disk full"})


@pytest.mark.usefixtures("own_context")
def test_copy_is_ready_on_all_ranks_or_failed_on_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order and however late one rank reports."""
    address: list[str] = []

    def broadcast(box: list[str], **_: Any) -> None:
        if box[0]:
            address[:] = box
        box[:] = address

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    first, second = Scheduler(0, 2), Scheduler(1, 2)
    ranks = [Rank0Broadcast(first), Rank0Broadcast(second)]  # type: ignore[arg-type]
    ranks[0].report(1)
    ranks[0].report(2)
    ranks[0].report(3, "bad page")
    ranks[1].report(2)
    assert first.received() == messages.Moved([2])
    ranks[1].report(3)
    assert first.received() == messages.Moved([], {3: "rank 0: bad page"})
    ranks[1].report(1, "disk full")
    assert first.received() == messages.Moved([], {1: "rank 1: disk full"})
    ranks[1].send(messages.Moved([9]))
    ranks[0].send(messages.Moved([8]))
    assert first.received() == messages.Moved([8])
