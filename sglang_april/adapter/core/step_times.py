"""Times decode steps on rank 0 and broadcasts the tuned concurrency (`messages.Tuned`)."""

import time

from sglang.srt.managers.schedule_batch import ScheduleBatch

from sglang_april.adapter.core.rank0_broadcast import Rank0Broadcast
from sglang_april.api import messages
from sglang_april.scheduler.concurrency import ConcurrencyTuner

TUNE_INTERVAL = 128
"""Decode steps between two evaluations of the curve."""


class StepTimes:
    """Times each step from one boundary to the next; also in the overlap loop, a boundary follows a step's results.

    It is called only in steps in which a round uses the limit.
    """

    def __init__(self, broadcast: Rank0Broadcast, slots: int) -> None:
        self._broadcast = broadcast
        self._tuner = ConcurrencyTuner(slots)
        self._began, self._rows, self._steps = 0.0, 0, 0
        self._launched = -1
        """The step whose batch `_rows` counts."""

    def boundary(self, step: int) -> None:
        """Called at the top of a scheduling step, with the number of the step that has ended."""
        before, self._began = self._began, time.perf_counter()
        if step != self._launched:
            self._tuner.pause()
            return
        if not self._rows:
            return
        self._tuner.note(self._rows, self._began - before)
        self._steps += 1
        if self._steps % TUNE_INTERVAL == 0:
            limit = self._tuner.tune()  # it adds the newest steps to the curve
            curve = self._tuner.curve().values()
            self._broadcast.send(messages.Tuned(limit, [(round(n, 1), 1e3 * seconds) for n, seconds in curve]))

    def launched(self, step: int, batch: ScheduleBatch | None) -> None:
        """Record the batch that the step runs."""
        self._rows = len(batch.reqs) if batch is not None and batch.forward_mode.is_decode() else 0
        self._launched = step
