"""Calls to trainer ranks in other processes."""

import contextlib
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.bridge.reference import micro_batches
from tests.bridge.two_steps import settings
from trainer_bridge.megatron import workers
from trainer_bridge.megatron.worker import Outcome

serve = workers._serve


class EchoingWorker:
    """A rank that returns the arguments of a call."""

    def __init__(self, *_settings: Any) -> None:
        pass

    def join(self, _init_method: str) -> Outcome:
        return None, None

    def do(self, _method: str, args: tuple[Any, ...]) -> Outcome:
        return args, None


def serve_echo(pipe: Connection, *arguments: Any) -> None:
    """Main function of such a rank's process."""
    with patch.object(workers, "RemoteWorker", EchoingWorker):
        serve(pipe, *arguments)


@contextlib.contextmanager
def open_files_limited(more: int) -> Iterator[None]:
    """No more than `more` further ones, also in processes that are started meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_call_may_have_more_tensors_than_a_process_may_have_files(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_serve", serve_echo)
    batches = micro_batches(40)
    with open_files_limited(200):
        ranks = workers.ProcessWorkers(settings(tmp_path, world_size=2))
        try:
            answers = ranks.call("step", [(batches,), (batches,)])
        finally:
            ranks.close()
    for (got,) in answers:
        for a, b in zip(got, batches, strict=True):
            assert torch.equal(a.sequences.ids, b.sequences.ids)
            assert torch.equal(a.tokens.advantages, b.tokens.advantages)
