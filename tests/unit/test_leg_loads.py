"""A leg that waits for the stored KV of an earlier one: what its load may take, and how long it waits."""

import pytest

from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
STORED = 40
"""Output tokens of the leg whose KV is on the host."""


def stored_leg(**engine: object) -> LegHarness:
    """A leg has ended, and its KV is on the host."""
    w = LegHarness(replicas=1, slots=4, pool=100, **engine)
    w.leg("run", "a", PROMPT, STORED, "t")
    while w.ended("a") is None:
        w.step()
    w.step(2)
    assert w.do(FakeEngine.flush)
    w.step(3)
    assert len(w.engine.free) == w.engine.pool
    return w


def next_leg(w: LegHarness, length: int = 4) -> None:
    w.leg("run", "b", [*w.sequence("a"), 1], length, "t")


@OVERLAP
def test_a_load_leaves_the_memory_of_a_prefill_in_chunks(overlap: bool) -> None:
    """SGLang gives it a whole chunk, whatever is free, and the server ends."""
    w = stored_leg(overlap=overlap, chunk=16)
    stock = w.do(lambda e: e.add_foreign_request("s", 3, 70, 4))
    w.step(2)
    next_leg(w)
    w.step(40)  # raises where the server would end
    assert stock.reason is not None
    assert w.ended("b") is not None


@OVERLAP
@pytest.mark.parametrize("drawn", range(34, 42))
def test_a_load_leaves_the_memory_of_the_next_decode(overlap: bool, drawn: int) -> None:
    """SGLang would retract a request for it, and abort one that runs alone."""
    w = stored_leg(overlap=overlap, chunk=64)
    stock = w.do(lambda e: e.add_foreign_request("s", 999, 20, 60))
    w.step(drawn)
    next_leg(w)
    w.step(60)  # raises where SGLang would abort the request
    assert stock.reason is not None
    assert w.ended("b") is not None
