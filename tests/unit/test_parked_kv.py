"""KV that stays with a trajectory between two legs: what the next leg prefills, and what memory is left."""

import pytest

from sglang_april.api import messages
from sglang_april.scheduler.eviction import eviction_priority
from sglang_april.scheduler.trajectories import MAX_BRANCHES
from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def w(request: pytest.FixtureRequest) -> LegHarness:
    return LegHarness(overlap=request.param, slots=4)


def turn(w: LegHarness, rid: str, ids: list[int], length: int = 3, name: str = "t") -> messages.LegEnded:
    assert w.leg("run", rid, ids, length, name)
    for _ in range(100):
        if (leg := w.ended(rid)) is not None:
            return leg
        w.step()
    raise AssertionError(f"{rid} has not ended")


def without_kv(w: LegHarness) -> int:
    """How many tokens of an ended leg have no KV: the last one, unless the overlap loop's next step has computed it."""
    return 0 if w.engine.overlap else 1


def spans(leg: messages.LegEnded) -> list[tuple[int, str]]:
    return [(s.version, s.kv) for s in leg.result.spans]


def test_eight_turns_and_two_pushes_prefill_only_what_is_new(w: LegHarness) -> None:
    history, prefilled = list(PROMPT), []
    for i in range(8):
        leg = turn(w, f"{i}", history, 4)
        prefilled.append(leg.prefilled)
        assert spans(leg) == [(w.context.clock.version, "kept" if w.context.clock.version else "fresh")]
        history = [*w.sequence(f"{i}"), 1, 2]
        if i in (2, 5):
            w.push()
    assert prefilled == [3] + [2 + without_kv(w)] * 7


def test_a_trip_to_the_host(w: LegHarness) -> None:
    turn(w, "a", PROMPT)
    w.step(2)
    assert w.do(FakeEngine.flush)
    (parked,) = w.context.trajectories["run"].legs.parked
    assert parked.kv.pages is not None
    assert parked.kv.pages.slots is None
    leg = turn(w, "b", [*w.sequence("a"), 1])
    assert (leg.prefilled, spans(leg)) == (1 + without_kv(w), [(0, "fresh")])


def test_a_prompt_without_new_tokens_computes_the_last_one(w: LegHarness) -> None:
    turn(w, "a", PROMPT)
    w.push()
    leg = turn(w, "b", w.sequence("a"))
    assert (leg.prefilled, spans(leg)) == (1, [(1, "kept")])


@pytest.mark.parametrize("trajectory", [[], ["t"]], ids=["alone", "trajectory"])
def test_a_request_that_has_just_ended_does_not_block_a_flush(w: LegHarness, trajectory: list[str]) -> None:
    """SGLang removes it from its batch in the next step."""
    assert w.leg("run", "a", PROMPT, 3, *trajectory)
    while not any(row.reason for row in w.engine.running):
        w.step()
    assert w.do(FakeEngine.flush)


def test_recompute_prefills_everything_after_a_push(w: LegHarness) -> None:
    w.open("run", None, kv="recompute")
    turn(w, "a", PROMPT)
    assert turn(w, "b", [*w.sequence("a"), 1]).prefilled == 1 + without_kv(w)
    w.push()
    leg = turn(w, "c", [*w.sequence("b"), 1])
    assert (leg.prefilled, spans(leg)) == (len(leg.prompt_ids) // 4 + leg.shared, [(1, "fresh")])


def test_a_leg_that_was_prefilled_as_a_whole_is_suspended_once(w: LegHarness) -> None:
    """Its sample held the KV of an earlier leg, which was released."""
    w.open("run", None, kv="recompute")
    turn(w, "a", PROMPT)
    w.push()
    w.leg("run", "b", [*w.sequence("a"), 1], 9, "t")
    w.step(4)
    w.command(messages.Freeze)
    assert len(list(w.context.ledger.with_kv())) == 1
    assert not w.context.trajectories["run"].legs.parked


def test_edited_history_leaves_the_kv_to_the_leg_that_continues_it(w: LegHarness) -> None:
    turn(w, "a", PROMPT)
    assert turn(w, "b", [*PROMPT, 9, 9]).prefilled == 5
    assert turn(w, "c", [*w.sequence("a"), 1]).prefilled == 1 + without_kv(w)
    assert turn(w, "d", [*w.sequence("b"), 1]).prefilled == 1 + without_kv(w)


def test_two_legs_that_continue_the_same_one(w: LegHarness) -> None:
    turn(w, "a", PROMPT)
    history = w.sequence("a")
    w.leg("run", "b", [*history, 1], 3, "t")
    w.leg("run", "c", [*history, 2], 3, "t")
    w.step(15)
    legs = [w.ended("b"), w.ended("c")]
    assert sorted(leg.prefilled for leg in legs if leg is not None) == [1 + without_kv(w), 7]


def test_an_interruption_before_the_prefill_keeps_the_kv(w: LegHarness) -> None:
    w.open("run", None)
    turn(w, "a", PROMPT)
    w.command(messages.Freeze)
    w.leg("run", "b", [*w.sequence("a"), 1], 3, "t")
    w.step(2)
    w.abort("b")
    w.command(messages.Thaw)
    w.push()
    leg = turn(w, "c", [*w.sequence("a"), 1])
    assert (leg.prefilled, spans(leg)) == (1 + without_kv(w), [(1, "kept")])


def test_an_interruption_in_the_middle_of_the_prefill_forgets_what_is_stored_of_the_old_kv(w: LegHarness) -> None:
    """The prefill after a push computes all KV again, so the next copy may not begin with the old version's."""
    w = LegHarness(overlap=w.engine.overlap, slots=4, chunk=4)
    turn(w, "a", list(range(5, 45)), 4)
    w.step(2)
    for e in w.engines:
        (parked,) = e.controller.context.trajectories["run"].legs.parked
        assert parked.kv.pages is not None
        parked.kv.pages.node, parked.kv.pages.protected = 1, 40
    assert w.do(FakeEngine.flush)
    w.leg("run", "b", [*w.sequence("a"), *range(12)], 3, "t")
    while w.engine.chunked is None:
        w.step()
    (sample,) = next(iter(w.context.trajectories["run"].active.values())).pending
    assert sample.kv.prefix is not None
    w.push()
    assert sample.kv.prefix is None
    assert w.context.clock.version == 1


def test_parked_kv_makes_room_for_the_kv_of_a_leg_that_waits(w: LegHarness) -> None:
    """Other requests keep running in what is left of the pool, so it would wait for ever."""
    w = LegHarness(overlap=w.engine.overlap, slots=4, pool=80)
    for name in "abc":
        turn(w, name, PROMPT, 27 if name == "c" else 16, name=name)
    w.step(2)
    assert w.do(FakeEngine.flush)
    w.step(4)
    for name in "ab":
        turn(w, f"{name}2", [*w.sequence(name), 1], 8, name=name)
    w.leg("run", "c2", [*w.sequence("c"), 1], 2, "c")
    for i in range(30):
        w.leg("run", f"short {i}", PROMPT, 4)
        w.step(2)
    assert w.ended("c2") is not None


def test_what_a_leg_drew_before_its_abort_stays_as_well(w: LegHarness) -> None:
    w.leg("run", "a", PROMPT, 30, "t")
    w.step(6)
    w.abort("a")
    assert turn(w, "b", [*w.sequence("a"), 1]).prefilled == 2


def test_the_end_of_a_trajectory_frees_its_kv(w: LegHarness) -> None:
    for name in "abc":
        turn(w, name, PROMPT, name=name)
    w.done("run", "a", reject=("b",))
    assert [s.group.leg.trajectory.id for s in w.context.trajectories["run"].legs.parked if s.group.leg] == ["c"]
    w.command(messages.Drop, run="run")
    assert len(w.engine.free) == w.engine.pool


def test_the_cap_releases_what_was_parked_first(w: LegHarness) -> None:
    for e in w.engines:
        e.controller.context.park_cap_tokens = 12
    for name in "abc":
        turn(w, name, PROMPT, 4, name=name)
    assert [turn(w, f"2{name}", [*w.sequence(name), 1], name=name).prefilled for name in "ca"] == [1 + without_kv(w), 8]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_was_parked_first_is_evicted_first(overlap: bool) -> None:
    """By length, as suspended samples are, the KV of abandoned long trajectories would fill the tiers."""
    w = LegHarness(overlap=overlap, slots=4, host_cap=12)
    turn(w, "long", PROMPT, 8, name="long")
    turn(w, "short", PROMPT, 3, name="short")
    w.step(2)
    assert w.do(FakeEngine.flush)
    w.step(4)
    held = {s.group.leg.trajectory.id for s in w.context.trajectories["run"].legs.parked if s.kv.pages and s.group.leg}
    assert held == {"short"}
    (sample,) = (s for s in w.context.trajectories["run"].legs.parked if s.kv.pages)
    before = eviction_priority(sample)
    w.leg("run", "next", [*w.sequence("short"), 1], 3, "short")
    assert eviction_priority(sample) > 0 > before, "its leg will use it"


@pytest.mark.parametrize("host", [0, 60])
def test_memory_is_flat_over_three_hundred_trajectories(w: LegHarness, host: int) -> None:
    w = LegHarness(overlap=w.engine.overlap, slots=4, pool=60, host_cap=host)
    w.open("run", None)
    for i in range(300):
        first = turn(w, f"{i}.0", PROMPT, 4, name=f"t{i}")
        assert first.prefilled == 3
        turn(w, f"{i}.1", [*w.sequence(f"{i}.0"), 1], 4, name=f"t{i}")
        if i >= 20:
            w.done("run", f"t{i - 20}")
        if i % 50 == 49:
            w.push()
    parked = w.context.trajectories["run"].legs.parked
    assert len(parked) <= 21
    w.done("run", *(f"t{i}" for i in range(280, 300)))
    assert not parked
    assert len(w.engine.free) == w.engine.pool
    assert not any(w.engine.controller.tiers.used.values())


@pytest.mark.parametrize("pool", range(24, 30))
def test_kv_that_is_parked_as_memory_runs_out_is_freed_for_the_next_decode(w: LegHarness, pool: int) -> None:
    """The step in flight ends the leg, after memory for the decode behind it was found missing."""
    w = LegHarness(overlap=w.engine.overlap, slots=4, pool=pool)
    w.leg("run", "a", PROMPT, 10, "t")
    w.leg("run", "alone", PROMPT, 20)
    for _ in range(100):
        w.step()  # raises where SGLang would abort a request
        if not w.engine.running and not w.engine.waiting:
            break
    assert w.ended("a") is not None
    assert [event.rid for event in w.answered()] == ["a", "alone"]


def test_old_branches_are_not_compared_and_keep_no_kv(w: LegHarness) -> None:
    for i in range(MAX_BRANCHES + 1):
        turn(w, f"{i}", [*PROMPT, 10 + i], 1)
    (trajectory,) = w.context.trajectories["run"].active.values()
    assert len(trajectory.sequences) == MAX_BRANCHES
    assert sum(sequence.parked is not None for sequence in trajectory.sequences) == MAX_BRANCHES
    old = turn(w, "old", [*w.sequence("0"), 1], 1)
    assert (old.mismatch, old.shared) == (True, len(PROMPT))
    latest = turn(w, "latest", [*w.sequence(f"{MAX_BRANCHES}"), 1], 1)
    assert (latest.mismatch, latest.parent) == (False, MAX_BRANCHES)
