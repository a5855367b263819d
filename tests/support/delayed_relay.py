"""The relay of sampled tokens as late as on a GPU.

In SGLang's overlap loop a forward writes its tokens to `FutureMap` when it ends, which on a GPU is after the scheduler
has prepared the next batch. On the CPU streams do nothing, and the write happens at launch. Here a write of the forward
stream waits until the next work of that stream, the latest moment that is legal; any other write happens at once.
"""

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any


class DelayingStream:
    """Replaces `Scheduler.forward_stream_ctx`."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._entered = False
        self._delayed: list[Callable[[], Any]] = []

    def __enter__(self) -> Any:
        for call in self._delayed:
            call()
        self._delayed.clear()
        self._entered = True
        return self._context.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        self._entered = False
        return self._context.__exit__(kind, error, trace)

    def call(self, stash: Callable[..., None], *args: Any) -> None:
        if self._entered:
            self._delayed.append(partial(stash, *args))
        else:
            stash(*args)


def delay(_result: Any, scheduler: Any) -> None:
    """AFTER `Scheduler.init_overlap`. On a GPU the stream itself delays the write, and a call from here would take
    another stream."""
    if scheduler.enable_overlap and scheduler.device == "cpu":
        scheduler.forward_stream_ctx = stream = DelayingStream(scheduler.forward_stream_ctx)
        scheduler.future_map.stash = partial(stream.call, scheduler.future_map.stash)
