"""`torch.cuda` streams and events without a GPU: queues on the host, run in any order that a GPU may take.

Work on a stream runs only while a caller waits for it, or by chance. An event is complete when the record it was
last given has run; waiting for an event refers to its last record before the wait, as in CUDA.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Record:
    done: bool = False


@dataclass(eq=False)
class Event:
    last: Record | None = None

    def record(self, stream: "Stream") -> None:
        self.last = record = Record()
        stream.queue.append((None, lambda: setattr(record, "done", True)))


@dataclass(eq=False)
class Stream:
    gpu: "FakeGpu"
    queue: deque[tuple[Record | None, Callable[[], Any]]] = field(default_factory=deque)
    """(the record to wait for first, what to do)."""

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def wait_event(self, event: Event) -> None:
        if event.last is not None and event not in self.gpu.unordered:
            self.queue.append((event.last, lambda: None))

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.queue)


class FakeGpu:
    """All streams of one device; `choose` decides which runs next."""

    def __init__(self, choose: random.Random) -> None:
        self._choose = choose
        self.streams: list[Stream] = []
        self.default = self.stream()
        self.current = self.default
        self.unordered: set[Event] = set()
        """Events that no stream waits for, to show that a test needs these waits."""

    def stream(self, *_args: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, act: Callable[[], Any]) -> None:
        """Queue work on the current stream, and let some streams advance."""
        self.current.queue.append((None, act))
        for _ in range(self._choose.randrange(3)):
            self._step()

    def run_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if not self._step():
                raise AssertionError("deadlock: each stream waits for an event that nothing records")

    def _step(self) -> bool:
        ready = [s for s in self.streams if s.queue and (s.queue[0][0] is None or s.queue[0][0].done)]
        if not ready:
            return False
        self._choose.choice(ready).queue.popleft()[1]()
        return True
