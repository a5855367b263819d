"""A leg that waits for its prefill on KV of an earlier one: what its load takes, how long it waits, what it keeps."""

import random
from typing import Any

import pytest

from sglang_april.api import messages
from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
STORED = 40
"""Output tokens of the leg whose KV is on the host."""


def stored_leg(length: int = STORED, **engine: Any) -> LegHarness:
    """A leg has ended, and its KV is on the host."""
    w = LegHarness(replicas=1, **{"slots": 4, "pool": 100, **engine})
    w.leg("run", "a", PROMPT, length, "t")
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


@OVERLAP
@pytest.mark.parametrize("kind", ["stock", "attached"])
def test_steady_requests_do_not_starve_a_leg(overlap: bool, kind: str) -> None:
    """Its KV needs most of the pool, and a request always waits."""
    w = stored_leg(130, overlap=overlap, slots=16, pool=160, chunk=64)
    rng = random.Random(0)

    def arrive(name: str) -> None:
        length = rng.randint(1, 18)
        if kind == "stock":
            w.do(lambda e: e.add_foreign_request(name, length - 1, 6, 18))
        else:
            w.leg("other", name, [1] * 6, length)

    for i in range(16):
        arrive(f"first {i}")
    w.step(5)
    next_leg(w)
    for step in range(700):
        if w.ended("b") is not None:
            break
        if not w.engine.waiting:
            arrive(f"s{step}")
        w.step()
    assert w.ended("b") is not None


@OVERLAP
@pytest.mark.parametrize("length", [30, 50], ids=["fits beside another", "fits alone"])
@pytest.mark.parametrize("host_cap", [0, 1000])
def test_the_kv_of_the_leg_that_waits_is_not_evicted_for_it(overlap: bool, length: int, host_cap: int) -> None:
    """SGLang needs room for the tokens behind it only."""
    w = LegHarness(replicas=1, overlap=overlap, slots=4, pool=100, chunk=64, host_cap=host_cap)
    w.leg("run", "a", PROMPT, STORED, "t")
    while w.ended("a") is None:
        w.step()
    w.step(2)
    w.do(lambda e: e.add_foreign_request("s", 19, 30, 20))
    w.step(2)
    next_leg(w, length)
    w.step(120)
    leg = w.ended("b")
    assert leg is not None
    assert leg.prefilled == 2 - overlap


@OVERLAP
def test_a_queued_leg_that_loses_old_kv_runs_on_kv_of_the_current_version(overlap: bool) -> None:
    """Requests that run take its memory; the leg is prefilled as a whole, and a later suspension must know that."""
    w = LegHarness(replicas=1, overlap=overlap, slots=4, pool=90, chunk=64, host_cap=0)
    w.leg("run", "a", PROMPT, STORED, "t")
    while w.ended("a") is None:
        w.step()
    w.step(2)
    w.push()
    for name in ("s1", "s2"):
        w.do(lambda e, name=name: e.add_foreign_request(name, 19, 5, 20))
    w.step(2)
    next_leg(w, 32)
    w.step(2)
    (queued,) = w.engine.waiting
    assert queued.sample.kv.pages is not None
    assert queued.sample.kv.version == 0
    while len(queued.output) < 5:
        w.step()
    assert queued.sample.kv.version == 1
    w.command(messages.Freeze)  # `recount` compares the version with that of each slot
    w.command(messages.Thaw)
    w.step(60)
    leg = w.ended("b")
    assert leg is not None
    assert leg.prefilled > STORED
    assert [(s.start, s.end, s.version, s.kv) for s in leg.result.spans] == [(0, 32, 1, "fresh")]


@OVERLAP
@pytest.mark.parametrize("copy_delay", [0, 6])
def test_the_kv_of_a_queued_leg_yields_although_its_copy_was_cancelled(overlap: bool, copy_delay: int) -> None:
    """The leg takes its KV over while that is copied to the host. It waits behind a request that needs the memory."""
    w = LegHarness(replicas=1, overlap=overlap, slots=4, pool=100, chunk=128, copy_delay=copy_delay)
    w.leg("run", "a", PROMPT, STORED, "t")
    while w.ended("a") is None:
        w.step()
    w.step(2)
    stock = w.do(lambda e: e.add_foreign_request("s", 9, 70, 10))
    w.step()
    next_leg(w)
    w.step(100)
    assert stock.reason is not None
    assert w.ended("b") is not None


@OVERLAP
def test_a_leg_that_fits_only_without_its_kv_gives_it_up(overlap: bool) -> None:
    """It nearly fills the pool, and its last page of KV is of no use: its prompt adds no token."""
    w = LegHarness(replicas=1, overlap=overlap, slots=4, pool=100, chunk=128)
    w.leg("run", "a", PROMPT, STORED, "t")
    while w.ended("a") is None:
        w.step()
    w.step(2)
    w.leg("run", "b", w.sequence("a"), 56, "t")
    w.step(100)
    assert w.ended("b") is not None


@OVERLAP
def test_a_leg_waits_for_memory_in_the_step_after_a_prefill(overlap: bool) -> None:
    """The rows of that prefill run, although they are not in the running batch yet."""
    w = stored_leg(overlap=overlap, chunk=128)
    w.do(lambda e: e.add_foreign_request("s", 19, 65, 20))
    w.step()
    next_leg(w)
    w.step(60)
    leg = w.ended("b")
    assert leg is not None
    assert leg.prefilled == 2 - overlap
