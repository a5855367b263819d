"""Pushes one policy to all engines, under one policy version (`one-version-per-push`).

    IDLE ──begin on every engine──▸ OPEN ──every bucket to every engine──▸ OPEN ──end on every engine──▸ IDLE
      ▴                              │ any failure                                   │ any failure
      └─── the next push begins ◂── FAILED ◂─────────────────────────────────────────┘

In FAILED, engines with an open push or a failed weight call answer rounds with 503 and the reason, and keep their
partials. The next push begins again on all engines, under a version greater than any engine's, which recovers them.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from sglang_april.client import AprilError
from trainer_bridge.handshake import HandshakeError, shake_hands, shared_gpu
from trainer_bridge.megatron.shapes import ModelShape
from trainer_bridge.push.disk import DiskTransport
from trainer_bridge.push.distributed import DistributedTransport
from trainer_bridge.push.push_target import PushTarget, WeightCallError, call_all
from trainer_bridge.push.tensor import TensorTransport
from trainer_bridge.push.transport import WeightBucket, WeightTransport
from trainer_bridge.trainer import PushReport, TransportName

BUCKET_BYTES = 512 << 20
PUSH_ERRORS = (WeightCallError, AprilError, httpx.HTTPError, RuntimeError, OSError)
"""Errors of an engine during a push; torch.distributed raises `RuntimeError`."""


class PushFailed(RuntimeError):  # noqa: N818
    """A push failed on some engine. The engines refuse rounds until a push succeeds."""


class PushState(Enum):
    """State of a pusher."""

    IDLE = "idle"
    OPEN = "open"
    FAILED = "failed"


class Pusher:
    """Pushes to a fixed set of engines."""

    def __init__(self, engines: Sequence[PushTarget], transport: WeightTransport) -> None:
        self.engines, self.transport, self.state = engines, transport, PushState.IDLE
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="push")

    def push(self, batches: Iterable[list[tuple[str, Tensor]]], version: int | None = None) -> PushReport:
        """Push one policy, given as lists of tensors by Hugging Face names; each list is sent as one bucket.

        `version`: its policy version; default: one more than the highest version of any engine. `batches` is consumed
        to its end even after a failure, because producing it may be a collective that involves other ranks.
        Raises: PushFailed.
        """
        seconds = {"begin": 0.0, "weights": 0.0, "end": 0.0}
        sent_bytes, calls, failure = 0, 0, ""

        def attempt(phase: str, call: Callable[[], Any]) -> Any:
            """Make a call unless an earlier one failed, and add its duration to the phase."""
            nonlocal failure
            if failure:
                return None
            started = time.perf_counter()
            try:
                return call()
            except PUSH_ERRORS as error:
                failure = str(error) or repr(error)
                return None
            finally:
                seconds[phase] += time.perf_counter() - started

        self.state = PushState.OPEN
        target = attempt("begin", lambda: self._begin(version))
        attempt("begin", self.transport.open)
        for batch in batches:
            bucket = WeightBucket.of(batch)
            attempt("weights", partial(self.transport.send, bucket))
            sent_bytes, calls = sent_bytes + bucket.flat.numel(), calls + 1
        attempt("weights", self.transport.finish)
        attempt("end", lambda: self._call_all(lambda engine: engine.april.push_end(target)))
        if failure:
            self.state = PushState.FAILED
            self.transport.abort()
            raise PushFailed(f"the push failed, and rounds are refused until one succeeds: {failure}")
        self.state = PushState.IDLE
        return PushReport(target, sent_bytes, calls, seconds)

    def _begin(self, version: int | None) -> int:
        versions = self._call_all(lambda engine: engine.april.state()["policy_version"])
        target = max(versions) + 1 if version is None else version
        self._call_all(lambda engine: engine.april.push_begin(target))
        return target

    def _call_all(self, call: Callable[[PushTarget], Any]) -> list[Any]:
        return call_all(self._threads, [partial(call, engine) for engine in self.engines])

    def close(self) -> None:
        """Close the transport and the connections."""
        self.transport.close()
        self._threads.shutdown()
        for engine in self.engines:
            engine.close()


def connect(
    urls: Sequence[str],
    transport: TransportName,
    *,
    source: Path,
    device: torch.device,
    api_key: str | None = None,
) -> Pusher:
    """Check every engine (`handshake.py`) and create a pusher for them.

    `source`: the trainer's Hugging Face folder.
    Raises: HandshakeError: an engine does not fit the trainer, or `distributed` would put two ranks on one GPU.
    """
    if not urls:
        raise ValueError("no engine to push to")
    shape = ModelShape.read(source)
    engines = [PushTarget(shake_hands(url.rstrip("/"), shape, api_key), api_key) for url in urls]
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    shared = shared_gpu(gpu, [engine.info for engine in engines])
    if transport == "auto":
        transport = "tensor" if shared else "distributed"
    if transport == "distributed" and shared:
        raise HandshakeError(f"push: distributed is not possible: {shared}; push: tensor is")
    if transport == "distributed":
        return Pusher(engines, DistributedTransport(engines, device))
    if transport == "tensor":
        return Pusher(engines, TensorTransport(engines))
    if transport == "disk":
        return Pusher(engines, DiskTransport(engines, source))
    raise ValueError(f"push must be auto, distributed, tensor or disk, not {transport!r}")
