"""When measuring may begin.

Starting empty, first-finished variants look fast while their carry builds up. Measuring begins when the mean carry of
three rounds is within 10 % of the mean of the three before, or after a limit of rounds (the row is then marked). A
variant that carries nothing is steady after three rounds. Rows whose carry changes by more than 10 % of the delivered
tokens are marked as well.
"""

from collections.abc import Sequence

WINDOW = 3
TOLERANCE = 0.10


def is_steady(carried: Sequence[int]) -> bool:
    """Whether the tokens carried out of the rounds so far have stopped growing (or shrinking)."""
    if len(carried) >= WINDOW and not any(carried):
        return True
    if len(carried) < 2 * WINDOW:
        return False
    before = sum(carried[-2 * WINDOW : -WINDOW]) / WINDOW
    now = sum(carried[-WINDOW:]) / WINDOW
    return abs(now - before) <= TOLERANCE * before


def carry_is_level(grown: int, delivered_tokens: int) -> bool:
    """Whether the carry changed by little compared with the delivered tokens.

    Args:
        grown: growth of the carry over the measured rounds, in tokens; negative if it shrank.
    """
    return abs(grown) <= TOLERANCE * delivered_tokens
