"""Step 2 of 9 (admit): how many samples are worth running at once (`concurrency: auto`).

A sample more in the batch gives more tokens/s only while a step does not take longer for it. Once the device computes
as fast as it can, more samples only make more partials: more memory, and older tokens. So batch sizes are compared in
levels, each a 2^½ of the next, and the limit climbs from level to level like a hill:

    worth of a level = log(its tokens/s ÷ tokens/s of the next smaller) ÷ log(its batch ÷ the smaller batch)

which is 1 where a step takes as long for either (twice the samples, twice the tokens) and 0 where it takes longer in
proportion. Measured times come in, the limit goes out; one rank has it and tells the others (S9).
"""

import math
from collections import deque
from statistics import mean, median

PAYS = (0.15, 0.25)
"""A level is left for the smaller one when it is worth less than the first, and taken when worth more than the second:
between them a limit stays as it is. At 0.2, half as many samples again give 8 % more tokens/s."""
STEPS_PER_LEVEL = 64
"""Of a level, the newest so many step times are kept; a fourth of them makes it known."""
MEMORY = 8192
"""Steps after which a level that is not seen any more is forgotten: contexts grow, and steps with them."""


class Tuner:
    def __init__(self, slots: int) -> None:
        halves = range(math.floor(2 * math.log2(slots)) + 1)
        self.limits = list(dict.fromkeys(round(slots / 2 ** (half / 2)) for half in halves))
        """Samples at most, by level; level 0 is all slots."""
        self._level_of = [min(range(len(self.limits)), key=lambda x: self._far(x, n)) for n in range(1, slots + 1)]
        self._level = 0
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        """By level: samples, seconds."""
        self._last: dict[int, int] = {}
        self._steps = 0

    @property
    def limit(self) -> int:
        return self.limits[self._level]

    def note(self, batch: int, seconds: float) -> None:
        """One decode step of `batch` samples; a few that took much longer do no harm."""
        self._steps += 1
        level = self._level_of[min(batch, self.limits[0]) - 1]
        self._seen.setdefault(level, deque(maxlen=STEPS_PER_LEVEL)).append((batch, seconds))
        self._last[level] = self._steps

    def curve(self) -> dict[int, tuple[float, float]]:
        """Known levels: mean samples and median seconds of a step."""
        for level in [x for x, last in self._last.items() if self._steps - last > MEMORY]:
            del self._seen[level], self._last[level]
        return {
            level: (mean(n for n, _ in seen), median(s for _, s in seen))
            for level, seen in sorted(self._seen.items())
            if len(seen) >= STEPS_PER_LEVEL // 4
        }

    def tune(self) -> int:
        """Move the limit by a level at most, and return it. What is not known beside it is tried, the larger first."""
        curve, here = self.curve(), self._level
        if here not in curve:
            return self.limit
        smaller = here + 1 < len(self.limits)
        if smaller and _worth(curve, here, unknown=1.0) < PAYS[0]:
            self._level += 1
        elif here > 0 and _worth(curve, here - 1, unknown=1.0) >= PAYS[1]:
            self._level -= 1
        elif smaller and here + 1 not in curve:
            self._level += 1
        return self.limit

    def _far(self, level: int, batch: int) -> float:
        return abs(math.log(batch / self.limits[level]))


def _worth(curve: dict[int, tuple[float, float]], level: int, unknown: float) -> float:
    """Of a level, or `unknown` where it or the next smaller one is not known."""
    if level not in curve or level + 1 not in curve:
        return unknown
    (batch, seconds), (fewer, sooner) = curve[level], curve[level + 1]
    return 1 - math.log(seconds / sooner) / math.log(batch / fewer)
