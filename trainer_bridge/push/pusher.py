"""Step 8 of 9 (push): one policy to all engines, as one push on each (S1).

    IDLE ──begin on every engine──▸ OPEN ──every bucket to every engine──▸ OPEN ──end on every engine──▸ IDLE
      ▴                              │ anything fails                                │ anything fails
      └─── the next push begins ◂── FAILED ◂─────────────────────────────────────────┘

In FAILED the engines whose push is open, or whose weight call failed, answer rounds with 503 and the reason; partials
stay where they are. The next push begins again on all engines, under a version greater than any of theirs, and heals.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any, Protocol

import httpx
from torch import Tensor

from sglang_april.client import AprilError
from trainer_bridge.push.bucket import WeightBucket
from trainer_bridge.push.push_target import PushTarget, WeightCallError
from trainer_bridge.trainer import PushReport

BUCKET_BYTES = 512 << 20
FAILURES = (WeightCallError, AprilError, httpx.HTTPError, RuntimeError, OSError)
"""What may go wrong with an engine; `RuntimeError` is what torch.distributed raises."""


class PushFailed(RuntimeError):  # noqa: N818
    """A push that did not succeed on all engines: they refuse rounds until one does."""


class PushState(Enum):
    """Of a pusher."""

    IDLE = "idle"
    OPEN = "open"
    FAILED = "failed"


class WeightTransport(Protocol):
    """How weights get from here into the engines, bucket by bucket. Errors: `FAILURES`."""

    def open(self) -> None:
        """Before the first bucket of a push; whatever an earlier failure broke is made new."""

    def send(self, bucket: WeightBucket) -> None:
        """One bucket to all engines; returns when all have taken it."""

    def finish(self) -> None:
        """After the last bucket."""

    def broke(self) -> None:
        """The push has failed; nothing of this way may be trusted."""

    def close(self) -> None:
        """Give everything back."""


class Pusher:
    """Pushes to a fixed set of engines."""

    def __init__(self, engines: Sequence[PushTarget], way: WeightTransport) -> None:
        self.engines, self._way, self.state = engines, way, PushState.IDLE
        self._threads = ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="push")

    def push(self, batches: Iterable[list[tuple[str, Tensor]]], version: int | None = None) -> PushReport:
        """One policy, as lists of tensors by Hugging Face names; each list travels as one bucket.

        `version`: the policy version to give it; by default one more than the highest of any engine. All of `batches`
        is consumed, also after a failure: its making may be a collective that other ranks take part in.
        Raises `PushFailed`.
        """
        seconds = {"begin": 0.0, "weights": 0.0, "end": 0.0}
        sent, calls, failure = 0, 0, ""

        def attempt(part: str, do: Callable[[], Any]) -> Any:
            """Do one thing, unless something has failed already; the time it takes counts for its part."""
            nonlocal failure
            if failure:
                return None
            started = time.perf_counter()
            try:
                return do()
            except FAILURES as error:
                failure = str(error) or repr(error)
                return None
            finally:
                seconds[part] += time.perf_counter() - started

        self.state = PushState.OPEN
        target = attempt("begin", lambda: self._begin(version))
        attempt("begin", self._way.open)
        for batch in batches:
            bucket = WeightBucket.of(batch)
            attempt("weights", partial(self._way.send, bucket))
            sent, calls = sent + bucket.flat.numel(), calls + 1
        attempt("weights", self._way.finish)
        attempt("end", lambda: self._on_all(lambda engine: engine.april.push_end(target)))
        if failure:
            self.state = PushState.FAILED
            self._way.broke()
            raise PushFailed(f"the push failed, and rounds are refused until one succeeds: {failure}")
        self.state = PushState.IDLE
        return PushReport(target, sent, calls, seconds)

    def _begin(self, version: int | None) -> int:
        versions = self._on_all(lambda engine: engine.april.state()["policy_version"])
        target = max(versions) + 1 if version is None else version
        self._on_all(lambda engine: engine.april.push_begin(target))
        return target

    def _on_all(self, call: Callable[[PushTarget], Any]) -> list[Any]:
        """A call to every engine at once; all are waited for before the first error is raised."""
        return on_all(self._threads, [partial(call, engine) for engine in self.engines])

    def close(self) -> None:
        """End the way, and the connections."""
        self._way.close()
        self._threads.shutdown()
        for engine in self.engines:
            engine.close()


def on_all(threads: ThreadPoolExecutor, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of several calls at once; all have ended before the first error is raised."""
    futures = [threads.submit(call) for call in calls]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
