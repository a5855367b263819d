"""Every admitted sample eventually runs: runs, loads, waiting prefills and stock requests never starve one another.

`test_any_load_makes_progress` plays random loads on tiny pools. Without a claim of `Reservations` the loads of
`test_a_load_starves_without_the_claim` never end.
"""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_april.api import messages
from sglang_april.scheduler.reservations import Reservations
from tests.unit.controller_harness import ControllerHarness, given_as
from tests.unit.leg_harness import PROMPT, LegHarness

STEPS = 600
FOREIGN_STEPS = 300
"""Stock requests keep arriving for so many steps."""


def store_partials(w: ControllerHarness, rng: random.Random, run: str) -> None:
    """Up to three partials of the run, on the device or in a lower tier."""
    prompts = {f"{run}{i}": (rng.randint(3, w.engine.pool // 2), 1, -rng.randint(5, 12)) for i in range(3)}
    kept = dict(list(prompts.items())[: rng.randint(1, 3)])
    w.open(run, kept, quota=None, tier=rng.choice(("host", "host", "device", "auto")))
    w.step(rng.randint(3, 10))
    w.stop(run)


def queue_prompts(w: ControllerHarness, rng: random.Random, run: str) -> None:
    """A round for the partials and up to two new groups."""
    sizes = [(rng.randint(3, w.engine.pool // 2), rng.choice((1, 1, 3)), -rng.randint(2, 8)) for _ in range(2)]
    w.open(run, {f"{run}-new{i}": size for i, size in enumerate(sizes[: rng.randint(0, 2)])}, quota=None)


def steps_to_finish(seed: int) -> int | None:
    """Steps until all rounds of a random load have ended; None if some round never ends."""
    rng = random.Random(seed)
    pool = rng.choice((40, 50, 60, 80))
    w = ControllerHarness(
        every=10,
        slots=rng.choice((1, 1, 2, 3, 4)),
        pool=pool,
        chunk=rng.choice((16, 64)),
        overlap=rng.random() < 0.5,
        copy_delay=rng.choice((0, 1, 2, 4)),
        shares=rng.random() < 0.3,
        host_cap=1000,
    )
    runs = ("a", "b", "c")[: rng.choice((1, 2, 2, 3))]
    for run in runs:
        store_partials(w, rng, run)
    for run in runs:
        queue_prompts(w, rng, run)
    foreign, size = rng.choice((0, 1, 1, 3)), (rng.randint(3, pool // 2), rng.randint(1, 6))
    for step in range(STEPS):
        if not w.rounds:
            return step
        while step < FOREIGN_STEPS and w.engine.foreign_waiting() < foreign:
            w.do(lambda e, step=step: e.add_foreign_request(f"s{step}", 7, *size))
        w.step()
    return None


def test_any_load_makes_progress() -> None:
    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(seed=st.integers(0, 2**30))
    def loads(seed: int) -> None:
        assert steps_to_finish(seed) is not None

    loads()


def steps_of_a_prefill_beside_joins(_seed: int) -> int | None:
    """A stock request waits for a prefill while members of four groups join the batch on their prompts' KV."""
    w = ControllerHarness(slots=24, pool=4000, chunk=64, shares=True)
    for length in (3, 4, 5, 7):
        w.open(f"run-{length}", {"p": (5, 100, -length)}, quota=1)
    w.step(30)
    foreign = w.do(lambda e: e.add_foreign_request("s", 7, 4, 3))
    for step in range(30):
        if foreign.reason is not None:
            return step
        w.step()
    return None


@pytest.mark.parametrize(
    ("slots", "pool", "prompt", "stock"), [(8, 60, 33, (7, 10)), (8, 80, 46, (6, 18)), (16, 160, 113, (6, 18))]
)
@pytest.mark.parametrize("seed", range(4))
def test_steady_stock_requests_do_not_starve_a_partial(
    slots: int, pool: int, prompt: int, stock: tuple[int, int], seed: int
) -> None:
    """A partial on the host needs most of the pool, and a stock request always waits."""
    rng = random.Random(seed)
    w = ControllerHarness(every=10, slots=slots, pool=pool, chunk=64, host_cap=1000)
    w.open("a", {"p": (prompt, 1, -12)}, quota=None, tier="host")
    w.step(8)
    w.stop("a")
    w.step(4)

    def arrive(name: str) -> None:
        size, seed = (stock[0], rng.randint(1, stock[1])), rng.randint(0, 999)
        w.do(lambda e: e.add_foreign_request(name, seed, *size))

    for i in range(slots):
        arrive(f"first {i}")
    w.step(5)
    w.open("a", {}, quota=None)
    for step in range(700):
        if not w.rounds:
            return
        if not w.engine.foreign_waiting():
            arrive(f"s{step}")
        w.step()
    raise AssertionError("the partial has not finished")


@pytest.mark.parametrize("overlap", [False, True], ids=["normal", "overlap"])
def test_steady_attached_requests_do_not_starve_a_round(overlap: bool) -> None:
    """SGLang queues those that arrive itself, and one always waits."""
    w = LegHarness(replicas=1, overlap=overlap, slots=4, pool=400, chunk=64)
    arrived = 0

    def arrive() -> None:
        nonlocal arrived
        while len(w.engine.waiting) < 3:
            arrived += 1
            w.leg("agents", f"r{arrived}", PROMPT, 4 + arrived % 3)

    for _ in range(4):
        arrive()
        w.step()
    given, params = given_as({"p": (5, 1, -6), "q": (5, 1, -6)})
    spec = messages.RoundSpec("b", "batch", None, "group", "keep", None)
    w.command(messages.OpenRound, spec=spec, prompts=given, params=params)
    for _ in range(100):
        if not w.context.rounds:
            break
        arrive()
        w.step()
    assert not w.context.rounds, "no sample gets a slot"
    answered = len(w.answered())
    w.step(20)
    assert len(w.answered()) > answered > 0


CLAIMS: list[tuple[str, Callable[[int], int | None], int]] = [
    ("reserve_loading", steps_to_finish, 2),
    ("reserve_loading", steps_to_finish, 19),
    ("hold_turn", steps_to_finish, 5),
    ("hold_turn", steps_to_finish, 6),
    ("owe_prefill", steps_of_a_prefill_beside_joins, 0),
]


@pytest.mark.parametrize(("claim", "load", "seed"), CLAIMS)
def test_a_load_starves_without_the_claim(
    monkeypatch: pytest.MonkeyPatch, claim: str, load: Callable[[int], int | None], seed: int
) -> None:
    """Each claim is needed: the same load ends with it, and never ends without it."""
    assert load(seed) is not None
    monkeypatch.setattr(Reservations, claim, lambda *_: None)
    assert load(seed) is None


def test_a_load_starves_if_the_turn_of_a_stock_request_ends_the_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one slot, a sample keeps its claim in the steps in which the slot is for a stock request."""
    assert steps_to_finish(87) is not None
    monkeypatch.setattr(Reservations, "stock_turn", property(lambda _: False, lambda _, value: None), raising=False)
    assert steps_to_finish(87) is None


SHARES = [(4, 0, 4), (4, 1, 3), (4, 3, 2), (5, 9, 3), (0, 3, 0), (-1, 2, -1)]


@pytest.mark.parametrize(("free", "foreign", "slots"), SHARES)
def test_free_slots_are_shared_with_stock_requests(free: int, foreign: int, slots: int) -> None:
    assert Reservations().rollout_slots(free, foreign) == slots


def test_a_single_free_slot_alternates() -> None:
    claims = Reservations()
    assert [(claims.rollout_slots(1, 2), claims.stock_turn) for _ in range(4)] == [(1, False), (0, True)] * 2
