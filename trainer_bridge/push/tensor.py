"""Weight transport inside the weight call: handles of CUDA memory (same machine), or the bytes themselves on the CPU.

CPU tensors are not shared through PyTorch on purpose: its default strategy passes file descriptors, which only a child
process can open (SGLang's scheduler crashes on them), and the alternative leaves a daemon behind.
"""

import base64
import io
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing  # noqa: F401  (registers reductions for CUDA tensors)

from trainer_bridge.push.push_target import PushTarget, call_all
from trainer_bridge.push.transport import WeightBucket


class TensorTransport:
    """The transport `tensor`."""

    def __init__(self, engines: Sequence[PushTarget]) -> None:
        self._engines = engines
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="weights")

    def open(self) -> None:
        """Do nothing: there is no state."""

    def send(self, bucket: WeightBucket) -> None:
        """Send the bucket's tensors to all engines; on CUDA the engines map its memory until all have loaded it."""
        payload = serialize(list(bucket.views()))

        def call(engine: PushTarget) -> None:
            body = {"serialized_named_tensors": [payload] * engine.info.tp_size, "flush_cache": False}
            engine.weight_call("/update_weights_from_tensor", body)

        call_all(self._threads, [partial(call, engine) for engine in self._engines])

    def finish(self) -> None:
        """Do nothing: every bucket has been loaded."""

    def abort(self) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown(wait=False)


def serialize(tensors: list[tuple[str, Any]]) -> str:
    """A base64 pickle, as SGLang's `MultiprocessingSerializer.deserialize` reads it."""
    buffer = io.BytesIO()
    pickler = ForkingPickler if any(x.is_cuda for _, x in tensors) else pickle.Pickler
    # Pickling a view includes its whole storage.
    pickler(buffer).dump([(name, x if x.is_cuda else x.clone()) for name, x in tensors])
    return base64.b64encode(buffer.getvalue()).decode()
