"""Push by a process group of the trainer's rank 0 and all ranks of all engines: gloo on the CPU, NCCL on GPUs.

The engines learn by HTTP what comes, and receive it by one broadcast per bucket.
"""

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import httpx
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trainer_bridge.push.bucket import WeightBucket
from trainer_bridge.push.push_target import PushTarget, WeightCallError

LIMIT = timedelta(minutes=5)
"""For an engine to join the group, and for one bucket."""
POLL_S = 0.002
_groups = itertools.count()
T = TypeVar("T")


class DistributedTransport:
    """The default way."""

    def __init__(self, engines: Sequence[PushTarget], device: torch.device, master_address: str | None = None) -> None:
        self._engines, self._backend = engines, "nccl" if device.type == "cuda" else "gloo"
        self._address = master_address or reachable_address(engines)
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="weights")
        self._group: Any = None
        self._name = ""

    def open(self) -> None:
        """Make the group, the first time and after a failure."""
        if self._group is not None:
            return
        self._end_on_engines()
        self._name = f"april-{os.getpid()}-{next(_groups)}"
        size = 1 + sum(engine.facts.tp_size for engine in self._engines)
        store = dist.TCPStore(self._address, 0, size, is_master=True, timeout=LIMIT, wait_for_workers=False)
        offsets = itertools.accumulate((engine.facts.tp_size for engine in self._engines), initial=1)
        joins = [
            self._threads.submit(
                engine.weight_call,
                "/init_weights_update_group",
                {
                    "master_address": self._address,
                    "master_port": store.port,
                    "rank_offset": offset,
                    "world_size": size,
                    "group_name": self._name,
                    "backend": self._backend,
                },
            )
            for engine, offset in zip(self._engines, offsets, strict=False)
        ]
        joined = _beside(partial(join_group, self._backend, dist.PrefixStore(self._name, store), size, self._name))
        # An engine that refuses never comes, and the group would be waited for until `LIMIT`.
        wait([*joins, joined], return_when=FIRST_EXCEPTION)
        _finish([call for call in joins if _has_refused(call)] or joins)
        self._group = joined.result()

    def send(self, bucket: WeightBucket) -> None:
        """Announce the bucket, broadcast it, and hear that it was loaded."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        calls = [self._threads.submit(e.weight_call, "/update_weights_from_distributed", body) for e in self._engines]
        lost: RuntimeError | None = None
        try:
            self._broadcast(bucket, calls)
        except RuntimeError as error:
            lost = error
        if lost is not None or any(map(_has_refused, calls)):
            # The words of an engine that refused say more than the lost connections that follow.
            refused = [call for call in calls if _has_refused(call)]
            self.broke()
            self._release(calls)
            _finish(refused or [call for call in calls if call.done()])
            raise lost or WeightCallError("an engine did not answer")
        _finish(calls)

    def _release(self, calls: Sequence[Future[None]]) -> None:
        """Let go those who wait in the broadcast, by closing what they wait on.

        Gloo's broadcast is a tree: a rank may wait for an engine that has refused, which has the group open and will
        never send. So whoever has answered leaves the group. Our own leaving closes nothing as long as a send to the
        engine that refused is under way.
        """
        body = {"group_name": self._name}
        left: set[int] = set()
        deadline = time.monotonic() + LIMIT.total_seconds()
        while len(left) < len(calls) and time.monotonic() < deadline:
            answered = {number for number, call in enumerate(calls) if call.done()} - left
            wait([self._threads.submit(self._leave, self._engines[number], body) for number in answered])
            left |= answered
            wait([call for number, call in enumerate(calls) if number not in left], POLL_S, FIRST_COMPLETED)

    @staticmethod
    def _leave(engine: PushTarget, body: dict[str, Any]) -> None:
        with contextlib.suppress(WeightCallError):  # it has lost the group, or has died
            engine.weight_call("/destroy_weights_update_group", body)

    def _broadcast(self, bucket: WeightBucket, calls: Sequence[Future[None]]) -> None:
        """Until all engines have the bucket, or one has refused the call: it never comes to the broadcast."""
        work = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        deadline = time.monotonic() + LIMIT.total_seconds()
        while not work.is_completed():
            if any(map(_has_refused, calls)):
                return
            if time.monotonic() > deadline:
                raise WeightCallError(f"an engine did not take a bucket within {LIMIT}")
            time.sleep(POLL_S)
        work.wait()

    def finish(self) -> None:
        """Nothing: the group is kept for the next push."""

    def broke(self) -> None:
        """Leave the group, whose other members may be in the middle of something."""
        if self._group is not None:
            left, self._group = [self._group], None
            threading.Thread(target=_abandon, args=(left,), daemon=True).start()

    def close(self) -> None:
        """End the group on both sides."""
        self._end_on_engines()
        self.broke()
        self._threads.shutdown(wait=False)

    def _end_on_engines(self) -> None:
        """Let engines forget the last group; one that has lost it, or has died, says so in vain."""
        if self._name:
            body = {"group_name": self._name}
            wait([self._threads.submit(e.weight_call, "/destroy_weights_update_group", body) for e in self._engines])
            self._name = ""


def reachable_address(engines: Sequence[PushTarget]) -> str:
    """This machine's address as engines can reach it: the one of the route to the engine that is farthest away."""
    routes = [_route(httpx.URL(engine.url)) for engine in engines]
    return next((address for address in routes if not address.startswith("127.")), routes[0])


def _route(url: httpx.URL) -> str:
    # Connecting a datagram socket sends nothing; it chooses the route.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((url.host, url.port or 80))
        return str(s.getsockname()[0])


def join_group(backend: str, store: dist.Store, size: int, name: str) -> Any:
    """Rank 0 of a process group beside the trainer's own world; `new_group` can only make subsets of that.

    The same call as on SGLang's side (`init_custom_process_group`), for both must agree on the store's keys.
    """
    group, _ = distributed_c10d._new_process_group_helper(
        size, 0, [], dist.Backend(backend), store, group_name=name, timeout=LIMIT
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group


def _abandon(left: list[Any]) -> None:
    """Forget a group. With its last reference it waits for a broadcast that never ends, so that must be dropped here,
    and nowhere in the caller: there it would hold up the push, and the other engines, until `LIMIT`.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        dist.destroy_process_group(left[0])
    left.clear()


def _beside(call: Callable[[], T]) -> Future[T]:
    """A call in a thread that nobody waits for at the end of the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised where the result is read
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _has_refused(call: Future[None]) -> bool:
    return call.done() and call.exception() is not None


def _finish(calls: Sequence[Future[None]]) -> None:
    """Wait for all, then raise the first error."""
    wait(calls)
    for call in calls:
        call.result()
