"""Weight transport through a Hugging Face folder on a file system that the engines share: simple, but slow."""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from trainer_bridge.child_processes import push_folder_prefix
from trainer_bridge.hf_folder import write_hf
from trainer_bridge.push.push_target import PushTarget, call_all
from trainer_bridge.push.transport import WeightBucket


class DiskTransport:
    """The transport `disk`: collects buckets in host memory, writes them at the end, and has the engines load them."""

    def __init__(self, engines: Sequence[PushTarget], source: Path) -> None:
        self._engines, self._source = engines, source
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="weights")
        self._tensors: list[tuple[str, Tensor]] = []

    def open(self) -> None:
        """Discard earlier buckets."""
        self._tensors = []

    def send(self, bucket: WeightBucket) -> None:
        """Keep a host copy of the bucket."""
        host = WeightBucket(bucket.names, bucket.dtypes, bucket.shapes, bucket.flat.cpu())
        self._tensors += host.views()

    def finish(self) -> None:
        """Write a temporary folder, and have all engines load it.

        The folder is deleted also after a failure or Ctrl-C, for a rank that is killed by its parent: SGLang copies the
        weights, and does not read it again.
        """
        with tempfile.TemporaryDirectory(prefix=push_folder_prefix(os.getpid())) as folder:
            write_hf(self._tensors, self._source, Path(folder))
            self._tensors = []
            body = {"model_path": folder, "flush_cache": False}
            calls = [partial(engine.weight_call, "/update_weights_from_disk", body) for engine in self._engines]
            call_all(self._threads, calls)

    def abort(self) -> None:
        """Discard the collected buckets."""
        self._tensors = []

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)
