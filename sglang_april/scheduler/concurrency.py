"""Step 2 of 9 (admit): how many samples are worth running at once (`concurrency: auto`).

A sample more in the batch gives more tokens/s only while a step does not take longer for it. Once the device computes
as fast as it can, more samples only make more partials: more memory, and older tokens. So batch sizes are compared in
levels, each a 2^½ of the next, and the limit climbs from level to level like a hill:

    worth of a level = log(its tokens/s ÷ tokens/s of the next smaller) ÷ log(its batch ÷ the smaller batch)

which is 1 where a step takes as long for either (twice the samples, twice the tokens) and 0 where it takes longer in
proportion. It is found by moving: the newest steps before a move against the newest after it. A machine that others
share is faster in one minute than in the next by more than a level is worth, so steps that lie farther apart are never
compared. Measured times come in, the limit goes out; one rank has it and tells the others (S9).
"""

import math
from collections import deque
from statistics import mean, median

PAYS = (0.15, 0.25)
"""A level is left for the smaller one when it is worth less than the first, and taken when worth more than the second:
between them a limit stays as it is. At 0.2, half as many samples again give 8 % more tokens/s."""
NEWEST = 64
"""Steps on either side of a comparison; what ran before a move has left by then. A fourth of them is enough."""
MEMORY = 8192
"""Steps after which what a level is worth is forgotten, and found again: contexts grow, and steps with them."""
APART = math.log(2) / 4
"""Of a move that changed the batch by less than half a level (too few samples, a round's end) nothing can be said."""

Steps = tuple[float, float]
"""Mean samples and median seconds of some steps."""


class ConcurrencyTuner:
    def __init__(self, slots: int) -> None:
        halves = range(math.floor(2 * math.log2(slots)) + 1)
        self.limits = list(dict.fromkeys(round(slots / 2 ** (half / 2)) for half in halves))
        """Samples at most, by level; level 0 is all slots."""
        self._level = 0
        self._newest: deque[tuple[int, float]] = deque(maxlen=NEWEST)
        """Since the last look: samples, seconds."""
        self._before: tuple[int, Steps] | None = None
        """What the last look saw: level, steps."""
        self._worth: dict[int, tuple[float, int]] = {}
        """Of a level, and when that was found."""
        self._curve: dict[int, tuple[Steps, int]] = {}
        self._steps = 0

    @property
    def limit(self) -> int:
        return self.limits[self._level]

    def note(self, batch: int, seconds: float) -> None:
        """One decode step of `batch` samples; a few that took much longer do no harm."""
        self._steps += 1
        self._newest.append((batch, seconds))

    def pause(self) -> None:
        """Nobody asks for the limit now: steps before and after this are too far apart to be compared."""
        self._newest.clear()
        self._before = None

    def curve(self) -> dict[int, Steps]:
        """What was last seen at each level; for reports."""
        return {level: steps for level, (steps, _) in sorted(self._curve.items())}

    def tune(self) -> int:
        """Move the limit by a level at most, and return it. What is not known is tried, the larger first."""
        now = self._look()
        if now is None:
            return self.limit
        here, smaller = self._level, self._level + 1 < len(self.limits)
        larger_pays = here > 0 and self._worth_of(here - 1, unknown=1.0) >= PAYS[1]
        if smaller and self._worth_of(here, unknown=1.0) < PAYS[0]:
            self._level += 1
        elif larger_pays:
            self._level -= 1
        elif smaller and here not in self._worth:
            self._level += 1
        return self.limit

    def _look(self) -> Steps | None:
        """At the steps since the last look; None if they are too few."""
        seen, before, here = self._newest, self._before, self._level
        self._newest, self._before = deque(maxlen=NEWEST), None
        self._worth = {x: entry for x, entry in self._worth.items() if self._steps - entry[1] <= MEMORY}
        self._curve = {x: entry for x, entry in self._curve.items() if self._steps - entry[1] <= MEMORY}
        if len(seen) < NEWEST // 4:
            return None
        now = mean(n for n, _ in seen), median(s for _, s in seen)
        self._before = here, now
        self._curve[here] = now, self._steps
        if before is not None and before[0] != here:
            self._compare({before[0]: before[1], here: now})
        elif here > 0 and before is None and here - 1 not in self._worth:
            # A pause fell into the try: rounds are too short for one, and would be spent on trying for ever.
            self._worth[here - 1] = 1.0, self._steps
        return now

    def _compare(self, sides: dict[int, Steps]) -> None:
        """Two neighbours, just before a move and after it."""
        (larger, (batch, seconds)), (_, (fewer, sooner)) = sorted(sides.items())
        apart = math.log(batch / fewer)
        worth = 1 - math.log(seconds / sooner) / apart if apart >= APART else 1.0
        self._worth[larger] = worth, self._steps

    def _worth_of(self, level: int, unknown: float) -> float:
        return self._worth.get(level, (unknown, 0))[0]
