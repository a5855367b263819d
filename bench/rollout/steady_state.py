"""When measuring may begin.

From empty, first-finished looks fast by building up carry. Measured rounds begin when the carried tokens' mean over
three rounds is within 10 % of the mean over the three before, or after a limit, which is then marked. So are rows whose
carry moves by more than 10 % of what they deliver.
"""

from collections.abc import Sequence

from bench.rollout.metrics import Block

WINDOW = 3
WITHIN = 0.10


def is_steady(carried: Sequence[int]) -> bool:
    """Whether the tokens carried out of the rounds so far have stopped growing (or shrinking)."""
    if len(carried) < 2 * WINDOW:
        return False
    before = sum(carried[-2 * WINDOW : -WINDOW]) / WINDOW
    now = sum(carried[-WINDOW:]) / WINDOW
    return abs(now - before) <= WITHIN * before


def is_level(blocks: Sequence[Block]) -> bool:
    """Whether measured rounds delivered what was computed in them, and not their carry, nor built it up."""
    delivered = sum(measured.round.tokens for block in blocks for measured in block.rounds)
    moved = sum((block.rounds[-1].round.carry or 0) - block.carry_before for block in blocks)
    return abs(moved) <= WITHIN * delivered
