"""Weight transport by broadcast: one process group of the trainer's rank 0 and all ranks of all engines.

The backend is gloo on the CPU and NCCL on GPUs. An HTTP call announces each bucket, and one broadcast carries it.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import httpx
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer_bridge.push.push_target import PushTarget, WeightCallError
from trainer_bridge.push.transport import WeightBucket

TIMEOUT = timedelta(minutes=5)
"""Limit for all engines to join the group, and for the broadcast of one bucket."""
RELEASE_S = 30.0
"""Limit for the engines to leave a group. NCCL sets up its communicator in the first broadcast, because SGLang does not
when it joins, and an engine that waits there for one that refused cannot be released from outside."""
POLL_S = 0.002
_group_numbers = itertools.count()
T = TypeVar("T")


class DistributedTransport:
    """The transport `distributed`, the default where trainer and engines use different GPUs."""

    def __init__(self, engines: Sequence[PushTarget], device: torch.device, master_address: str | None = None) -> None:
        self._engines, self._backend = engines, "nccl" if device.type == "cuda" else "gloo"
        self._address = master_address or reachable_address(engines)
        self._group: Any = None
        self._store: dist.TCPStore | None = None
        self.group_name = ""
        """Name of the process group at the engines; empty if there is none."""

    def open(self) -> None:
        """Create the group, for the first push and after a failure."""
        if self._group is not None:
            return
        self._destroy_on_engines()
        self.group_name = f"april-{os.getpid()}-{next(_group_numbers)}"
        size = 1 + sum(engine.info.tp_size for engine in self._engines)
        connect = partial(dist.TCPStore, self._address, world_size=size, timeout=TIMEOUT, wait_for_workers=False)
        self._store = connect(port=0, is_master=True)
        port = self._store.port
        offsets = itertools.accumulate((engine.info.tp_size for engine in self._engines), initial=1)
        engine_joins = [
            _call(
                engine,
                "/init_weights_update_group",
                {
                    "master_address": self._address,
                    "master_port": port,
                    "rank_offset": offset,
                    "world_size": size,
                    "group_name": self.group_name,
                    "backend": self._backend,
                },
            )
            for engine, offset in zip(self._engines, offsets, strict=False)
        ]
        prefix_store = dist.PrefixStore(self.group_name, connect(port=port, is_master=False))
        own_join = _run_in_daemon(partial(join_group, self._backend, prefix_store, size, self.group_name))
        wait([*engine_joins, own_join], return_when=FIRST_EXCEPTION)
        refused = [call for call in engine_joins if _has_failed(call)]
        if refused:
            # Without its store, the members that wait for this engine fail at once, and not after `TIMEOUT`.
            self._store = None
        _wait_and_raise(refused or engine_joins)
        self._group = own_join.result()

    def send(self, bucket: WeightBucket) -> None:
        """Announce the bucket, broadcast it, and wait until every engine has loaded it."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self.group_name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        calls = [_call(engine, "/update_weights_from_distributed", body) for engine in self._engines]
        broadcast_error: RuntimeError | None = None
        try:
            self._broadcast(bucket, calls)
        except RuntimeError as error:
            broadcast_error = error
        if broadcast_error is not None or any(map(_has_failed, calls)):
            # The reason of an engine that refused is more useful than the lost connections that follow.
            refused = [call for call in calls if _has_failed(call)]
            self.abort()
            self._release_engines(calls)
            _wait_and_raise(refused or [call for call in calls if call.done()])
            raise broadcast_error or WeightCallError("an engine did not answer")
        _wait_and_raise(calls)

    def _release_engines(self, calls: Sequence[Future[None]]) -> None:
        """Unblock engines that wait in the broadcast by closing the connections that they wait on.

        Gloo's broadcast is a tree: a rank may wait for an engine that refused, which keeps the group open and will
        never send. So every engine that has answered leaves the group. The trainer's leaving closes nothing while a
        send to the engine that refused is pending.
        """
        left: set[int] = set()
        deadline = time.monotonic() + RELEASE_S
        while len(left) < len(calls) and time.monotonic() < deadline:
            answered = {number for number, call in enumerate(calls) if call.done()} - left
            self._leave([self._engines[number] for number in answered])
            left |= answered
            wait([call for number, call in enumerate(calls) if number not in left], POLL_S, FIRST_COMPLETED)

    def _leave(self, engines: Sequence[PushTarget]) -> None:
        """Let engines leave the group. Errors of engines that lost it or are down are ignored."""
        body = {"group_name": self.group_name}
        wait([_call(engine, "/destroy_weights_update_group", body) for engine in engines], RELEASE_S)

    def _broadcast(self, bucket: WeightBucket, calls: Sequence[Future[None]]) -> None:
        """Broadcast the bucket; returns early if an engine refuses its call, because it never joins the broadcast."""
        # NCCL sets up its communicator in the first broadcast, which blocks until all engines take part.
        started = _run_in_daemon(partial(_start_broadcast, bucket.flat, self._group, _current_stream(bucket.flat)))
        deadline = time.monotonic() + TIMEOUT.total_seconds()
        while not (started.done() and started.result().is_completed()):
            if any(map(_has_failed, calls)):
                return
            if time.monotonic() > deadline:
                raise WeightCallError(f"an engine did not receive a bucket within {TIMEOUT}")
            time.sleep(POLL_S)
        started.result().wait()

    def finish(self) -> None:
        """Do nothing: the group is kept for the next push."""

    def abort(self) -> None:
        """Leave the group; its other members may be in the middle of a broadcast."""
        if self._group is not None:
            reference, self._group = [self._group], None
            threading.Thread(target=_destroy_group, args=(reference,), daemon=True).start()

    def close(self) -> None:
        """Destroy the group on both sides."""
        self._destroy_on_engines()
        self.abort()

    def _destroy_on_engines(self) -> None:
        """Destroy the last group on the engines."""
        if self.group_name:
            self._leave(self._engines)
            self.group_name = ""


def reachable_address(engines: Sequence[PushTarget]) -> str:
    """An address of this machine that all engines can reach: one of a non-loopback route if any engine is remote."""
    routes = [_local_address(httpx.URL(engine.url)) for engine in engines]
    return next((address for address in routes if not address.startswith("127.")), routes[0])


def _local_address(url: httpx.URL) -> str:
    # Connecting a datagram socket sends nothing; it only selects the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((url.host, url.port or 80))
        return str(s.getsockname()[0])


def join_group(backend: str, store: dist.Store, size: int, name: str) -> Any:
    """Rank 0 of a process group outside the trainer's default group; `new_group` can only create subsets of that.

    This is the same call as SGLang's `init_custom_process_group`, because both must use the same keys in the store.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        size, 0, [], dist.Backend(backend), store, group_name=name, timeout=TIMEOUT
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _start_broadcast(flat: torch.Tensor, group: Any, stream: Any) -> Any:
    """The work of a broadcast, queued behind what `stream` has been given."""
    with torch.cuda.stream(stream):  # also the device of this thread; without effect where it is None
        return dist.broadcast(flat, src=0, group=group, async_op=True)


def _current_stream(tensor: torch.Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def _destroy_group(reference: list[Any]) -> None:
    """Destroy a group. Dropping its last reference waits for a broadcast that may never end, so that must happen here:
    in the caller it would block the push, and the other engines, until `TIMEOUT`.

    NCCL's group is aborted first: destroying it waits for a pending broadcast, too.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        if dist.get_backend(reference[0]) == "nccl":
            reference[0].abort()
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group(reference[0])
    reference.clear()


def _run_in_daemon(call: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread, which the exit of the process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _call(engine: PushTarget, path: str, body: dict[str, Any]) -> Future[None]:
    """A weight call in a thread of its own, so that an engine that does not answer delays no other call, nor the exit
    of the process."""
    return _run_in_daemon(partial(engine.weight_call, path, body))


def _has_failed(call: Future[None]) -> bool:
    return call.done() and call.exception() is not None


def _wait_and_raise(calls: Sequence[Future[None]]) -> None:
    """Wait for all calls, then raise the first error."""
    wait(calls)
    for call in calls:
        call.result()
