"""When measuring may begin.

From empty, first-finished looks fast by building up carry. Measured rounds begin when the carried tokens' mean over
three rounds is within 10 % of the mean over the three before, or after a limit, which is then marked. So are rows whose
carry moves by more than 10 % of what they deliver.
"""

from collections.abc import Sequence

WINDOW = 3
TOLERANCE = 0.10


def is_steady(carried: Sequence[int]) -> bool:
    """Whether the tokens carried out of the rounds so far have stopped growing (or shrinking)."""
    if len(carried) < 2 * WINDOW:
        return False
    before = sum(carried[-2 * WINDOW : -WINDOW]) / WINDOW
    now = sum(carried[-WINDOW:]) / WINDOW
    return abs(now - before) <= TOLERANCE * before


def carry_is_level(grown: int, delivered_tokens: int) -> bool:
    """Whether measured rounds delivered what they computed: their carry neither supplied nor absorbed much of it.

    Args:
        grown: growth of the carry over the measured rounds, in tokens; negative if it shrank.
    """
    return abs(grown) <= TOLERANCE * delivered_tokens
