"""Push by a Hugging Face folder on a file system that the engines see too; the slowest way, and the simplest."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from torch import Tensor

from trainer_bridge.hf_folder import write_hf
from trainer_bridge.push.bucket import WeightBucket
from trainer_bridge.push.push_target import PushTarget
from trainer_bridge.push.pusher import on_all


class DiskTransport:
    """The way `disk`: buckets are collected in host memory, written at the end, and loaded by one call."""

    def __init__(self, engines: Sequence[PushTarget], source: Path, folder: Path) -> None:
        self._engines, self._source, self._folder = engines, source, folder
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="weights")
        self._tensors: list[tuple[str, Tensor]] = []

    def open(self) -> None:
        """Start over."""
        self._tensors = []

    def send(self, bucket: WeightBucket) -> None:
        """Keep the bucket."""
        host = WeightBucket(bucket.names, bucket.dtypes, bucket.shapes, bucket.flat.cpu())
        self._tensors += host.views()

    def finish(self) -> None:
        """Write the folder under another name, put it in its place, and let all engines load it."""
        part = self._folder.with_name(f"{self._folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        write_hf(self._tensors, self._source, part)
        shutil.rmtree(self._folder, ignore_errors=True)
        part.rename(self._folder)
        self._tensors = []
        body = {"model_path": str(self._folder), "flush_cache": False}
        calls = [partial(engine.weight_call, "/update_weights_from_disk", body) for engine in self._engines]
        on_all(self._threads, calls)

    def broke(self) -> None:
        """Forget what was collected."""
        self._tensors = []

    def close(self) -> None:
        """The folder is not needed once engines have loaded it."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._threads.shutdown(wait=False)
