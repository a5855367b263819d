"""Rounds and counters made up for the tests of bench.rollout."""

from typing import Any

from bench.rollout.engine_client import Counters
from bench.rollout.metrics import Measured
from bench.rollout.variant import Plan, RoundResult

ANY: Any = None
"""A value that no test reads."""
PLAN = Plan(slots=4, groups=1, n=2)


def measured(done: RoundResult, seconds: float = 1.0, **counts: int) -> Measured:
    return Measured(done, seconds, **{"decoded": 0, "steps": 0, "prefilled": 0, "after_end": 0, **counts})


def counters(time: float, running: int, steps: int, decoded: int, waiting: int = 0) -> Counters:
    return Counters(time, running, waiting, steps, decoded, 0)
