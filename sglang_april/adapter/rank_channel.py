"""Messages between the scheduler processes of one server, also across machines.

Every rank has one inbox. Between machines it is an open TCP port, so every message is sealed with a secret of this
launch: what another program sends, repeats or damages is dropped and logged, and never ends the thread that reads.
"""

import hashlib
import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from sglang_april.scheduler.decisions import Decided

MAX_BYTES = 64 << 10
"""Bytes of one message; the plugin's have less than 3 KiB."""
MAX_BUFFERED_BYTES = 1 << 20
"""ZMQ disconnects a sender of larger messages before it stores them, without a log line."""
LOG_INTERVAL_S = 10.0
MAC_BYTES = 32

log = logging.getLogger("sglang_april")


class Copied(msgspec.Struct, array_like=True, tag="copied"):
    """A copy order has ended on the sender; `failure` is empty if it succeeded."""

    order: int
    failure: str


Body = Copied | Decided


class _Message(msgspec.Struct, array_like=True):
    sender: int
    receiver: int
    number: int
    """Increases with every message from this sender to the receiver, so that none is accepted twice."""
    body: Body


_decoder = msgspec.msgpack.Decoder(_Message)
_encoder = msgspec.msgpack.Encoder()


class BadMessageError(ValueError):
    """A received message that is forged, damaged or repeated."""


class Inbox:
    """One rank's receiving end. Binding and reading are separate: the secret comes after the address is known."""

    def __init__(self, rank: int, host: str | None) -> None:
        """Args:
        host: this machine's address for ranks on other machines; None if all ranks are on this one.
        """
        self._rank = rank
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_BUFFERED_BYTES)
        self._socket.setsockopt(zmq.IPV6, 1)
        self.address = self._bind(host)
        self._newest: dict[int, int] = {}
        self._dropped, self._logged_at = 0, float("-inf")

    def read(self, secret: bytes, handle: Callable[[int, Body], None]) -> None:
        """Pass (sender, body) of messages to `handle`, in a thread whose exceptions end the server (`fail-stop`)."""
        threading.Thread(target=self._read, args=(secret, handle), name="april-observations", daemon=True).start()

    def _read(self, secret: bytes, handle: Callable[[int, Body], None]) -> None:
        while True:
            try:
                message = self._open(secret, self._socket.recv())
            except BadMessageError as error:
                self._log_dropped(str(error))
                continue
            handle(message.sender, message.body)

    def _open(self, secret: bytes, data: bytes) -> _Message:
        if len(data) > MAX_BYTES:
            raise BadMessageError(f"{len(data)} bytes exceed the limit")
        mac, content = data[:MAC_BYTES], data[MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(secret, content)):
            raise BadMessageError("it does not carry the secret of this launch")
        try:
            message = _decoder.decode(content)
        except msgspec.DecodeError as error:
            raise BadMessageError(str(error)) from error
        if message.receiver != self._rank:
            raise BadMessageError(f"it is addressed to rank {message.receiver}")
        if message.number <= self._newest.get(message.sender, -1):
            raise BadMessageError(f"message {message.number} of rank {message.sender} is a repetition")
        self._newest[message.sender] = message.number
        return message

    def _log_dropped(self, reason: str) -> None:
        self._dropped += 1
        if time.monotonic() - self._logged_at >= LOG_INTERVAL_S:
            log.warning("april: %d message(s) at %s dropped: %s", self._dropped, self.address, reason[:200])
            self._dropped, self._logged_at = 0, time.monotonic()

    def _bind(self, host: str | None) -> str:
        socket: Any = self._socket
        if host is not None:
            address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
            return f"{address}:{socket.bind_to_random_port(address)}"
        address = f"ipc://@april-{secrets.token_hex(16)}"  # Linux's abstract namespace: no file remains after a kill
        socket.bind(address)
        return address


class Sender:
    """The sending end to one other rank (or to this one). May be used from any thread."""

    def __init__(self, rank: int, receiver: int, address: str, secret: bytes) -> None:
        self._rank, self._receiver, self._secret, self._number = rank, receiver, secret, -1
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.LINGER, 0)  # a process that ends does not wait for a rank that has ended
        self._socket.connect(address)

    def send(self, body: Body) -> None:
        with self._lock:
            self._number += 1
            content = _encoder.encode(_Message(self._rank, self._receiver, self._number, body))
            self._socket.send(_mac(self._secret, content) + content)


def new_secret() -> bytes:
    return os.urandom(32)


def _mac(secret: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(content, key=secret, digest_size=MAC_BYTES).digest()
