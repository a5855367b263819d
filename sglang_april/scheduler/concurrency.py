"""Tunes how many samples run at once (`concurrency: auto`).

A larger batch gives more tokens/s only while a step does not take longer for it. Once the device is compute-bound, more
samples only make more partials: more memory, and older tokens. Batch sizes are compared in levels, each 2^½ of the
next, and the limit climbs from level to level (hill climbing):

    gain of a level = log(its tokens/s ÷ tokens/s of the next smaller level) ÷ log(its batch ÷ the smaller batch)

The gain is 1 where both batches have the same step time (twice the samples, twice the tokens) and 0 where the step time
is proportional to the batch. It is measured by moving: the newest steps before a move against the newest after it.
Distant steps are never compared, because the speed of a shared machine drifts by more than the difference
between two levels. Only rank 0 tunes; it broadcasts the limit (`rank-determinism`).
"""

import math
from collections import deque
from statistics import mean, median

MIN_GAIN, TARGET_GAIN = 0.15, 0.25
"""The limit moves down from a level with less than the first gain, and up to one with more than the second. At a gain
of 0.2, half as many samples again give 8 % more tokens/s."""
WINDOW = 64
"""Newest steps on either side of a comparison; samples of before a move have left by then. A quarter is enough."""
FORGET_STEPS = 8192
"""Steps after which a measured gain expires: contexts grow, and step times with them."""
MIN_LOG_RATIO = math.log(2) / 4
"""A move that changes the batch by less than half a level (too few samples, a round's end) measures nothing."""

Steps = tuple[float, float]
"""Mean samples and median seconds of some steps."""


class ConcurrencyTuner:
    def __init__(self, slots: int) -> None:
        halves = range(math.floor(2 * math.log2(slots)) + 1)
        self.limits = list(dict.fromkeys(round(slots / 2 ** (half / 2)) for half in halves))
        """Most samples by level; level 0 is all slots."""
        self._level = 0
        self._newest: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        """Steps since the last measurement: samples, seconds."""
        self._before: tuple[int, Steps] | None = None
        """The last measurement: level, steps."""
        self._gains: dict[int, tuple[float, int]] = {}
        """Gain by level, and the step at which it was measured."""
        self._curve: dict[int, tuple[Steps, int]] = {}
        self._steps = 0

    @property
    def limit(self) -> int:
        return self.limits[self._level]

    def note(self, batch: int, seconds: float) -> None:
        """Record one decode step of `batch` samples; outliers are tolerated."""
        self._steps += 1
        self._newest.append((batch, seconds))

    def pause(self) -> None:
        """No round uses the limit now: steps before and after this call are not compared."""
        self._newest.clear()
        self._before = None

    def curve(self) -> dict[int, Steps]:
        """The last measurement at each level, for reports."""
        return {level: steps for level, (steps, _) in sorted(self._curve.items())}

    def tune(self) -> int:
        """Move the limit by one level at most, and return it. Unknown levels are tried, the larger one first."""
        now = self._measure()
        if now is None:
            return self.limit
        level, smaller = self._level, self._level + 1 < len(self.limits)
        larger_pays = level > 0 and self._gain_of(level - 1, unknown=1.0) >= TARGET_GAIN
        if smaller and self._gain_of(level, unknown=1.0) < MIN_GAIN:
            self._level += 1
        elif larger_pays:
            self._level -= 1
        elif smaller and level not in self._gains:
            self._level += 1
        return self.limit

    def _measure(self) -> Steps | None:
        """Evaluate the steps since the last measurement; None if they are too few."""
        steps, before, level = self._newest, self._before, self._level
        self._newest, self._before = deque(maxlen=WINDOW), None
        self._gains = {x: entry for x, entry in self._gains.items() if self._steps - entry[1] <= FORGET_STEPS}
        self._curve = {x: entry for x, entry in self._curve.items() if self._steps - entry[1] <= FORGET_STEPS}
        if len(steps) < WINDOW // 4:
            return None
        now = mean(n for n, _ in steps), median(s for _, s in steps)
        self._before = level, now
        self._curve[level] = now, self._steps
        if before is not None and before[0] != level:
            self._compare({before[0]: before[1], level: now})
        elif level > 0 and before is None and level - 1 not in self._gains:
            # A pause interrupted the try: rounds are too short for one. Assume a gain of 1, so that tries end.
            self._gains[level - 1] = 1.0, self._steps
        return now

    def _compare(self, sides: dict[int, Steps]) -> None:
        """Compare two neighbouring levels, just before and after a move."""
        (larger, (batch, seconds)), (_, (fewer, sooner)) = sorted(sides.items())
        log_ratio = math.log(batch / fewer)
        gain = 1 - math.log(seconds / sooner) / log_ratio if log_ratio >= MIN_LOG_RATIO else 1.0
        self._gains[larger] = gain, self._steps

    def _gain_of(self, level: int, unknown: float) -> float:
        return self._gains.get(level, (unknown, 0))[0]
