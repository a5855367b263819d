"""Weight transport inside the weight call: handles of CUDA memory (same machine), or the bytes themselves on the CPU.

CPU tensors are not shared through PyTorch on purpose: its default strategy passes file descriptors, which only a child
process can open (SGLang's scheduler crashes on them), and the alternative leaves a daemon behind.
"""

import base64
import io
import itertools
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from trainer_bridge.push.push_target import PushTarget, call_all
from trainer_bridge.push.transport import WeightBucket

DEVICE_ARGUMENT = 6
"""Where `torch.multiprocessing.reductions.rebuild_cuda_tensor` takes the index of the GPU."""


class TensorTransport:
    """The transport `tensor`."""

    def __init__(self, engines: Sequence[PushTarget]) -> None:
        self._engines = engines
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="weights")

    def open(self) -> None:
        """Do nothing: there is no state."""

    def send(self, bucket: WeightBucket) -> None:
        """Send the bucket's tensors to all engines; on CUDA the engines map its memory until all have loaded it."""
        views = list(bucket.views())
        shares_memory = any(x.is_cuda for _, x in views)
        ranks = sum(engine.info.tp_size for engine in self._engines)
        # PyTorch counts the processes that map a tensor, one for each time that it is serialised.
        payloads = iter([serialize(views) for _ in range(ranks)] if shares_memory else [serialize(views)] * ranks)

        def call(engine: PushTarget, payloads: list[str]) -> None:
            body = {"serialized_named_tensors": payloads, "flush_cache": False}
            engine.weight_call("/update_weights_from_tensor", body)

        calls = [partial(call, e, list(itertools.islice(payloads, e.info.tp_size))) for e in self._engines]
        call_all(self._threads, calls)

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
    pickler = _IpcPickler if any(x.is_cuda for _, x in tensors) else pickle.Pickler
    # Pickling a view includes its whole storage.
    pickler(buffer).dump([(name, x if x.is_cuda else x.clone()) for name, x in tensors])
    return base64.b64encode(buffer.getvalue()).decode()


class _IpcPickler(ForkingPickler):
    """Names GPUs by their UUID, as SGLang's deserialiser accepts: an index means another GPU where other GPUs are
    visible (`_device_from_maybe_uuid` in sglang/srt/utils/patch_torch.py)."""

    def reducer_override(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, args = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(args[DEVICE_ARGUMENT]).uuid)
        return rebuild, (*args[:DEVICE_ARGUMENT], uuid, *args[DEVICE_ARGUMENT + 1 :])
