"""Attached requests beside stock ones: nobody waits for ever, and nobody takes memory that is set aside."""

import random

import pytest

from sglang_april.api import messages
from tests.unit.controller_harness import given_as
from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness


def stored_on_host(w: LegHarness, length: int = 40) -> None:
    """A first leg "a" of `length` tokens, whose KV is on the host."""
    w.leg("run", "a", PROMPT, length, "t")
    until_ended(w, "a")
    assert w.do(FakeEngine.flush)
    w.step(3)


def until_ended(w: LegHarness, rid: str, limit: int = 200) -> messages.LegEnded:
    for _ in range(limit):
        w.step()
        if (leg := w.ended(rid)) is not None:
            return leg
    raise AssertionError(f"{rid} has not ended after {limit} steps")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_leg_leaves_memory_to_the_next_chunk_of_a_prompt(overlap: bool) -> None:
    w = LegHarness(overlap=overlap, slots=4, pool=100, chunk=16)
    stored_on_host(w)
    w.do(lambda e: e.add_foreign_request("stock", 3, 70, 4))
    w.step(2)
    assert w.engine.chunked is not None
    w.leg("run", "b", [*w.sequence("a"), 1], 4, "t")
    assert until_ended(w, "b").prefilled <= 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("decoded", range(30, 40))
def test_a_leg_leaves_memory_to_the_next_decode(decoded: int, overlap: bool) -> None:
    w = LegHarness(overlap=overlap, slots=4, pool=100, chunk=64)
    stored_on_host(w)
    w.do(lambda e: e.add_foreign_request("stock", 999, 20, 60))
    w.step(decoded)
    w.leg("run", "b", [*w.sequence("a"), 1], 4, "t")
    until_ended(w, "b")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [120, 130])
def test_steady_stock_requests_do_not_starve_a_leg_on_stored_kv(length: int, seed: int) -> None:
    rng = random.Random(seed)
    w = LegHarness(overlap=False, slots=16, pool=160, chunk=64)
    stored_on_host(w, length - len(PROMPT))

    def arrive(name: str) -> None:
        seed, size = rng.randint(0, 999), rng.randint(1, 18)
        w.do(lambda e: e.add_foreign_request(name, seed, 6, size))

    for i in range(16):
        arrive(f"first {i}")
    w.step(5)
    w.leg("run", "b", [*w.sequence("a"), 1], 4, "t")
    for step in range(700):
        if w.ended("b") is not None:
            return
        if not w.engine.foreign_waiting():
            arrive(f"s{step}")
        w.step()
    raise AssertionError("the leg has not ended")


@pytest.mark.parametrize("attached", [True, False])
def test_steady_requests_do_not_starve_a_round(attached: bool) -> None:
    w, arrived = LegHarness(overlap=False, slots=4, pool=400, chunk=64), 0

    def stock(name: str, seed: int, length: int) -> None:
        w.do(lambda e: e.add_foreign_request(name, seed, 3, length))

    def arrive() -> None:
        nonlocal arrived
        while len(w.engine.waiting) < 2:
            arrived += 1
            length = 4 + arrived % 3
            if attached:
                w.leg("run", f"r{arrived}", PROMPT, length)
            else:
                stock(f"s{arrived}", arrived, length)

    for _ in range(4):
        arrive()
        w.step()
    given, params = given_as({"p": (5, 1, -6), "q": (5, 1, -6)})
    spec = messages.RoundSpec("r", "batch", None, "group", "keep", None)
    w.command(messages.OpenRound, spec=spec, prompts=given, params=params)
    for _ in range(100):
        if not w.context.rounds:
            return
        arrive()
        w.step()
    raise AssertionError("the round has not ended")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_leg_waits_beside_a_request_that_was_prefilled_in_the_last_step(overlap: bool) -> None:
    w = LegHarness(overlap=overlap, slots=4, pool=100, chunk=128)
    stored_on_host(w)
    w.do(lambda e: e.add_foreign_request("stock", 19, 65, 20))
    w.step()
    w.leg("run", "b", [*w.sequence("a"), 1], 4, "t")
    assert until_ended(w, "b").prefilled <= 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_leg_whose_kv_is_discarded_before_its_prefill_has_kv_of_the_current_policy(overlap: bool) -> None:
    w = LegHarness(overlap=overlap, slots=4, pool=90, chunk=64, host_cap=0)
    w.leg("run", "a", PROMPT, 40, "t")
    until_ended(w, "a")
    w.step(2)
    w.push()
    w.leg("run", "b", [*w.sequence("a"), 1], 20, "t")
    while not (running := w.engine.running) or len(running[0].output) < 5:
        w.step()
    (request,) = running
    assert request.sample is not None
    assert request.sample.group.leg.prefilled > 40  # no memory was left for the old KV and its prefill
    assert request.sample.kv.version == 1
    w.command(messages.Freeze)
    w.command(messages.Thaw)
    assert [(s.version, s.kv) for s in until_ended(w, "b").result.spans] == [(1, "fresh")]


def test_a_shutdown_copies_no_kv_of_attached_requests_to_disk() -> None:
    w = LegHarness(overlap=False, slots=4, disk_cap=1000)
    w.leg("run", "a", PROMPT, 30, "t")
    w.step(10)
    w.command(messages.Freeze)
    (sample,) = [s for run in w.context.ledger.runs.values() for s in run.suspended]
    assert sample.kv.pages is not None
    w.engine.controller.tiers.move_all_to_disk()
    assert sample.kv.pages.copy is None
