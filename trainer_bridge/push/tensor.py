"""Push of tensors inside the weight call itself: handles of CUDA memory (same machine), or the bytes on the CPU.

PyTorch's sharing of CPU tensors is left alone on purpose: its default passes file descriptors, which only a child
process can open (SGLang's scheduler dies of it), and its alternative leaves a daemon behind.
"""

import base64
import io
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing  # noqa: F401  (registers how CUDA tensors are shared)

from trainer_bridge.push.bucket import WeightBucket
from trainer_bridge.push.push_target import PushTarget
from trainer_bridge.push.pusher import on_all


class TensorTransport:
    """The way `tensor`."""

    def __init__(self, engines: Sequence[PushTarget]) -> None:
        self._engines = engines
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="weights")

    def open(self) -> None:
        """Nothing to make."""

    def send(self, bucket: WeightBucket) -> None:
        """The bucket's tensors to all engines; on CUDA they share its memory, which lives until all have them."""
        payload = serialise(list(bucket.views()))

        def call(engine: PushTarget) -> None:
            body = {"serialized_named_tensors": [payload] * engine.facts.tp_size, "flush_cache": False}
            engine.weight_call("/update_weights_from_tensor", body)

        on_all(self._threads, [partial(call, engine) for engine in self._engines])

    def finish(self) -> None:
        """Nothing."""

    def broke(self) -> None:
        """Nothing outlives a call."""

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)


def serialise(tensors: list[tuple[str, Any]]) -> str:
    """What SGLang's `MultiprocessingSerializer.deserialize` reads: a pickle, base64."""
    buffer = io.BytesIO()
    pickler = ForkingPickler if any(x.is_cuda for _, x in tensors) else pickle.Pickler
    # A view is pickled with the whole storage under it.
    pickler(buffer).dump([(name, x if x.is_cuda else x.clone()) for name, x in tensors])
    return base64.b64encode(buffer.getvalue()).decode()
