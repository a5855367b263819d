"""Observations of ranks reach the scheduler's inbox once all ranks have reported, as failed if one rank failed.

Between machines the ranks' inboxes are TCP ports: what other programs send there changes nothing.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import sock_recv

from sglang_april.adapter import rank_channel
from sglang_april.adapter.core import rank0_broadcast
from sglang_april.adapter.core.rank0_broadcast import Rank0Broadcast
from sglang_april.adapter.rank_channel import BadMessageError, Copied, Inbox, Sender
from sglang_april.api import messages
from sglang_april.scheduler.decisions import Decided, RanksDifferError
from tests.support.live import until

TIMEOUT_S = 60.0


class Scheduler(SimpleNamespace):
    """The attributes of a scheduler that Rank0Broadcast uses."""

    def __init__(self, rank: int, ranks: int, nnodes: int = 1) -> None:
        inbox: Any = zmq.Context.instance().socket(zmq.PULL) if rank == 0 else None
        super().__init__(
            ps=SimpleNamespace(tp_rank=rank, tp_size=ranks),
            ipc_channels=SimpleNamespace(recv_from_tokenizer=inbox),
            server_args=SimpleNamespace(nnodes=nnodes),
            tp_cpu_group=SimpleNamespace(rank=rank),
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


Ranks = tuple[list[Scheduler], list[Rank0Broadcast]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What threads have raised, which would end the server (`fail-stop`)."""
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: errors.append(failed.exc_value))
    return errors


@pytest.fixture
def start(own_context: Any, ended: list[Exception], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Start so many ranks, whose collective call runs between threads; addresses are those of TCP for two machines."""

    def start(ranks: int, nnodes: int = 1) -> Ranks:
        gathered: list[Any] = [None] * ranks
        barrier = threading.Barrier(ranks)

        def gather(out: list[Any], mine: Any, group: Any) -> None:
            gathered[group.rank] = mine
            barrier.wait(TIMEOUT_S)
            out[:] = gathered

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        monkeypatch.setattr(rank0_broadcast, "get_local_ip_auto", lambda: "127.0.0.1")
        schedulers = [Scheduler(rank, ranks, nnodes) for rank in range(ranks)]
        with ThreadPoolExecutor(ranks) as threads:
            broadcasts = list(threads.map(Rank0Broadcast, schedulers))
        addresses[:] = [address for address, _ in gathered]
        return schedulers, broadcasts

    addresses: list[str] = []
    start.addresses = addresses  # type: ignore[attr-defined]
    return start


@pytest.mark.usefixtures("own_context")
def test_single_rank_reports_are_sent_at_once() -> None:
    s = Scheduler(0, 1)
    broadcast = Rank0Broadcast(s)  # type: ignore[arg-type]
    broadcast.report(3)
    broadcast.report(4, "disk full")
    assert s.received() == messages.Moved([3])
    assert s.received() == messages.Moved([], {4: "disk full"})


@pytest.mark.parametrize("nnodes", [1, 2])
def test_copy_is_ready_on_all_ranks_or_failed_on_any(start: Callable[..., Ranks], nnodes: int) -> None:
    """In whatever order and however late one rank reports."""
    (first, _), ranks = start(2, nnodes)
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


def hostile(address: str, own: bytes) -> list[bytes]:
    """What another program may send to a rank's port."""
    forged = rank_channel._encoder.encode(rank_channel._Message(1, 0, 10**6, Copied(1, "forged")))
    return [b"", b"\xc1", b"nonsense" * 100, bytes(200_000), forged, rank_channel._mac(bytes(32), forged) + forged, own]


def test_a_hostile_sender_changes_nothing_and_the_channel_continues(
    start: Callable[..., Ranks], own_context: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Malformed, forged, huge and repeated messages on the TCP port of rank 0; the log has one line of them."""
    sent: list[bytes] = []
    original = rank_channel._mac
    monkeypatch.setattr(
        rank_channel, "_mac", lambda k, content: sent.append(original(k, content) + content) or sent[-1][:32]
    )
    (first, _), ranks = start(2, nnodes=2)
    address = start.addresses[0]  # type: ignore[attr-defined]
    assert address.startswith("tcp://127.0.0.1:")
    ranks[1].report(1)
    own = sent[0]
    monkeypatch.setattr(rank_channel, "_mac", original)
    other_program = own_context.socket(zmq.PUSH)
    other_program.connect(address)
    with caplog.at_level(logging.WARNING, logger="sglang_april"):
        for message in hostile(address, own) * 20:
            other_program.send(message)
        other_program.send_multipart([own, own])
        huge = own_context.socket(zmq.PUSH)
        huge.connect(address)
        huge.send(bytes(8 << 20))
        until(lambda: caplog.records, "something is dropped")
        ranks[0].report(2)
        ranks[1].report(2)
        assert first.received() == messages.Moved([2])
        ranks[0].report(1)
        assert first.received() == messages.Moved([1]), "rank 1 has reported this copy once"
    assert len(caplog.records) == 1
    assert "dropped" in caplog.records[0].getMessage()


@pytest.mark.usefixtures("own_context")
def test_a_message_is_accepted_once_and_by_its_receiver_alone() -> None:
    secret = rank_channel.new_secret()
    inbox, other = Inbox(0, None), Inbox(1, None)
    sender = Sender(2, 0, inbox.address, secret)
    sender.send(Copied(5, ""))
    sender.send(Copied(6, ""))
    first, second = inbox._socket.recv(), inbox._socket.recv()
    assert inbox._open(secret, first).body == Copied(5, "")
    for inbox_, data, reason in (
        (inbox, first, "is a repetition"),
        (other, first, "addressed to rank 0"),
        (inbox, second[:-1], "secret"),
        (inbox, bytes(70_000), "exceed the limit"),
    ):
        with pytest.raises(BadMessageError, match=reason):
            inbox_._open(secret, data)
    assert inbox._open(secret, second).body == Copied(6, "")


@pytest.mark.usefixtures("own_context")
@pytest.mark.parametrize("host", [None, "::1", "127.0.0.1"])
def test_an_inbox_of_one_machine_leaves_no_file_and_others_have_either_kind_of_address(host: str | None) -> None:
    """A killed server runs no clean-up, and the path of a socket has at most 107 characters."""
    if host == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    secret = rank_channel.new_secret()
    inbox = Inbox(0, host)
    assert inbox.address.startswith("ipc://@" if host is None else "tcp://")
    sender = Sender(1, 0, inbox.address, secret)  # it is kept: what a closed socket has not sent is lost
    sender.send(Copied(5, ""))
    assert inbox._socket.poll(TIMEOUT_S * 1000)
    assert inbox._open(secret, inbox._socket.recv()).body == Copied(5, "")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@given(data=st.binary(max_size=100), sealed=st.booleans())
@settings(max_examples=300)
def test_no_bytes_raise_anything_but_a_bad_message(data: bytes, sealed: bool) -> None:
    secret = bytes(32)
    inbox = Inbox.__new__(Inbox)
    inbox._rank, inbox._newest = 0, {}
    with contextlib.suppress(BadMessageError):
        inbox._open(secret, rank_channel._mac(secret, data) + data if sealed else data)


def test_neighbours_that_decide_differently_end_the_server(start: Callable[..., Ranks], ended: list[Exception]) -> None:
    """Three ranks, of which one differs: the report reaches the next rank although that waits in a forward."""
    _, ranks = start(3)
    for step in (1, 2):
        for rank in ranks:
            rank.compare(step, Decided(step, step, "start a[0]"))
    ranks[2].compare(3, Decided(3, 7, "start b[0]"))
    try:
        ranks[0].compare(3, Decided(3, 8, "start c[0]"))
    except RanksDifferError as error:  # the report has arrived before this rank's own decision
        ended.append(error)
    until(lambda: ended, "a rank notices")
    assert str(ended[0]) == (
        "TP ranks decided differently at step 3: rank 2 decided start b[0]; rank 0 decided start c[0]"
    )


def test_exception_of_the_handler_ends_the_server(start: Callable[..., Ranks], ended: list[Exception]) -> None:
    _, ranks = start(2)
    ranks[0]._failures_by_transfer = None  # type: ignore[assignment]
    ranks[1].report(1)
    until(lambda: ended, "the thread fails")
