"""The controller on the fake engine: slots, memory, resuming, and demotion under memory pressure."""

import pytest

from sglang_april.scheduler.state import State
from tests.unit.controller_harness import Build, ControllerHarness, ids, lengths


def tiers(w: ControllerHarness, run: str) -> dict[str, str]:
    return {s.group.id: s.kv.pages.tier if s.kv.pages else "none" for s in w.ledger.runs[run].suspended}


def leave_partials(w: ControllerHarness, sizes: dict[str, int], run: str = "idle") -> None:
    """A run without an open round, with one partial on the device per entry, of about that many KV tokens."""
    for name, size in sizes.items():
        w.open(run, {name: (size, 1, -6)}, quota=None)
        w.step(-(-size // w.engine.chunk) + 1)
        w.stop(run)
    assert tiers(w, run) == dict.fromkeys(sizes, "device")


@pytest.mark.parametrize(("host_cap", "tier"), [(1000, "host"), (0, "none")])
def test_partials_of_another_run_are_demoted_for_a_waiting_sample(harness: Build, host_cap: int, tier: str) -> None:
    """To the host, or to tokens only: a round is served although partials of an idle run hold the pool."""
    w = harness(pool=60, chunk=64, host_cap=host_cap)
    leave_partials(w, {"a": 20, "b": 25})
    w.open("run", {"p": (20, 1, -20)}, quota=1)
    assert ids(w.reply()) == ["p"]
    assert tiers(w, "idle")["a"] == tier
    w.drain()
    assert {(s.version, s.kv) for s in w.samples[("idle", "a", 0), 0].spans} == (
        {(0, "fresh")} if tier == "host" else {(0, "fresh"), (0, "recomputed")}
    )


def test_partials_are_demoted_for_a_waiting_stock_request(harness: Build) -> None:
    """`/generate` is served although partials hold all memory."""
    w = harness(pool=60, chunk=64)
    leave_partials(w, {"a": 20, "b": 25})
    foreign = w.do(lambda e: e.add_foreign_request("s", 19, 20, 20))
    w.step(40)
    assert len(foreign.output) == 20
    assert tiers(w, "idle") == {"a": "host", "b": "host"}


@pytest.mark.parametrize("preempts", [False, True])
def test_partials_are_demoted_for_a_stock_request_once_it_can_have_a_slot(harness: Build, preempts: bool) -> None:
    """While all slots are taken, memory alone does not start it, unless SGLang preempts a request of lower priority."""
    w = harness(pool=100, chunk=64, slots=2)
    w.do(lambda e: setattr(e, "preempts", preempts))
    leave_partials(w, {"a": 20, "b": 25})
    w.open("run", lengths(20, 20), quota=2)
    w.step()
    foreign = w.do(lambda e: e.add_foreign_request("s", 19, 20, 60))
    w.step(10)
    assert set(tiers(w, "idle").values()) == ({"host"} if preempts else {"device"})
    w.step(60)
    assert foreign.output
    assert tiers(w, "idle") == {"a": "host", "b": "host"}


def test_as_few_partials_as_needed_are_demoted_shortest_first(harness: Build) -> None:
    """In the order of `eviction_priority`."""
    w = harness(pool=100, chunk=100)
    leave_partials(w, {"a": 30, "b": 10, "c": 20})
    w.do(lambda e: e.add_foreign_request("s", 0, 30, 10))
    w.step()
    assert tiers(w, "idle") == {"a": "device", "b": "host", "c": "device"}


def test_mandatory_groups_are_demoted_last(harness: Build) -> None:
    """Regardless of length."""
    w = harness(pool=100, chunk=100, slots=4)
    leave_partials(w, {"short": 10}, "run")
    assert (w.push_begin(), w.push_end()) == (200, 200)
    leave_partials(w, {"long": 30}, "other")
    w.freeze(True)
    w.open("run", {}, quota=1, max_staleness=1)
    assert {g.id for g in w.controller.context.rounds["run"].mandatory} == {"short"}
    w.do(lambda e: e.add_foreign_request("s", 0, 40, 20))
    w.step()
    assert tiers(w, "run") | tiers(w, "other") == {"short": "device", "long": "host"}


def test_partials_are_demoted_for_running_samples(harness: Build) -> None:
    """As many as the next decodes need; no running sample is suspended."""
    w = harness(pool=68, chunk=64)
    leave_partials(w, {"a": 8, "b": 12})
    for run in ("run", "other"):
        w.open(run, {"p": (4, 1, -20)}, quota=1)
        w.step(3)
        assert tiers(w, "idle") == {"a": "device", "b": "device"}
    replies = [w.reply("run"), w.reply("other")]
    assert tiers(w, "idle") == {"a": "host", "b": "device"}
    assert [r.stats["suspended_for_memory"] for r in replies] == [0, 0]
    assert w.engine.retracts == 0


def test_running_work_is_suspended_only_when_no_partial_holds_the_device(harness: Build) -> None:
    """Partials are demoted first, then running samples suspended, newest first; none is retracted."""
    w = harness(pool=64, chunk=64, slots=4)
    leave_partials(w, {"idle": 20})
    w.open("run", {f"p{i}": (4, 1, -24) for i in range(4)}, quota=None)
    suspended = 0
    while "run" in w.rounds:
        w.step()
        run = w.ledger.runs["run"]
        if run.suspended:
            suspended += 1
            assert tiers(w, "idle") == {"idle": "host"}
            running = [r.sample.queue_position for r in w.engine.running if r.reason is None]
            assert min(s.queue_position for s in run.suspended) > max(running, default=-1)
    assert suspended
    assert w.replies[-1].stats["suspended_for_memory"]
    assert w.engine.retracts == 0
    assert ids(w.replies[-1])[0] == "p0"
    assert len(w.replies[-1].deliver) == 4


def test_a_sample_alone_gets_all_memory_and_never_runs_out(harness: Build) -> None:
    """The others are suspended for memory and resume when it has ended."""
    w = harness(pool=32, chunk=32, slots=4, host_cap=0)
    w.open("run", {f"p{i}": (4, 1, -25) for i in range(4)}, quota=None)
    reply = w.reply()
    assert len(reply.deliver) == 4
    assert {s.finish_reason["type"] for s in w.samples.values()} == {"stop"}


def test_when_nothing_runs_the_first_partial_evicts_the_others(harness: Build) -> None:
    """A sample waits until its estimate fits or nothing else runs; then there is no deadlock."""
    w = harness(pool=60, chunk=64, slots=1)
    w.open("run", {"first": (20, 1, -20)}, quota=1, tier="host")
    w.step(3)
    w.stop("run")
    assert tiers(w, "run") == {"first": "host"}
    leave_partials(w, {"a": 25}, "a")
    leave_partials(w, {"b": 25}, "b")
    w.open("run", {}, quota=1)
    reply = w.reply()
    assert (ids(reply), reply.stats["resumed_kept"]) == (["first"], 1)


def test_a_resume_leaves_room_for_the_next_decode() -> None:
    """SGLang's estimate is a fraction of what running requests may write; a resume must not cause a retract."""
    w = ControllerHarness(pool=48, chunk=64)
    w.open("run", {"a": (3, 1, -2)}, quota=None)
    w.step()
    w.stop("run")
    w.open("busy", {f"p{i}": (5, 1, -8) for i in range(4)}, quota=None)
    while w.engine.tokens_free() > 4:
        w.step()
    assert (w.engine.tokens_free(), w.engine.tokens_for_next_decode()) == (4, 4)
    w.open("run", {}, quota=None)
    w.reply("busy")
    assert ids(w.reply()) == ["a"]
    assert w.engine.retracts == 0


def test_a_prompt_as_large_as_the_pool_allows_is_served(harness: Build) -> None:
    """Although partials of its own and of other runs hold memory."""
    w = harness(pool=60, chunk=8)
    leave_partials(w, {"a": 20, "b": 25})
    leave_partials(w, {"small": 3}, "run")
    w.open("run", {"huge": (55, 1, -3)}, quota=2)
    assert sorted(ids(w.reply())) == ["huge", "small"]


@pytest.mark.parametrize("tier", ["auto", "device", "host", "none"])
def test_a_round_can_force_the_tier_of_its_partials(harness: Build, tier: str) -> None:
    """Resuming under the same version keeps the spans, except for `none`, which recomputes."""
    w = harness()
    w.open("run", lengths(2, 9, 9), quota=1, tier=tier)
    reply = w.reply()
    assert set(tiers(w, "run").values()) == {"device" if tier == "auto" else tier}
    held = {t: n for t, n in reply.carried["tokens_by_tier"].items() if n}
    assert held.keys() == set(tiers(w, "run").values())
    assert reply.carried["bytes"] == {t: 10 * held.get(t, 0) for t in ("device", "host", "disk")}
    w.open("run", {}, quota=None)
    stats = w.reply().stats
    again = 2 * (tier == "none")
    assert (stats["resumed_kept"], stats["resumed_recomputed"], stats["kv_fallback"]) == (2 - again, again, again)
    spans = w.samples[("run", "p1", 0), 0].spans
    assert [(s.version, s.kv) for s in spans] == [(0, "fresh"), (0, "recomputed")][: 2 if again else 1]


def test_at_the_end_of_a_round_what_is_kept_longest_is_copied_first(
    harness: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has room for one partial; a shorter one would be copied only to be evicted by it."""
    w = harness(chunk=64, host_cap=24)
    copied: list[str] = []
    copy_out = w.engine.copy_out
    monkeypatch.setattr(w.engine, "copy_out", lambda s, order: (copied.append(s.group.id), copy_out(s, order)))
    w.open("run", {"done": (3, 1, -2), "short": (4, 1, -30), "long": (20, 1, -30)}, quota=1, tier="host")
    assert ids(w.reply()) == ["done"]
    assert tiers(w, "run") == {"short": "none", "long": "host"}
    assert copied == ["long"]


def test_resumed_samples_join_in_their_old_order_before_anything_new(harness: Build) -> None:
    """Partials first, no prefill in that step, new groups as slots come free."""
    w = harness(slots=4)
    w.open("run", lengths(1, 9, 9, 9), quota=1)
    w.reply()
    w.open("run", {"new": (3, 1, -9), "newer": (3, 1, -9)}, quota=1)
    w.step()
    assert [r.sample.group.id for r in w.engine.running] == ["p1", "p2", "p3"]
    assert w.sample("run", "new").state is State.QUEUED
    w.step(3)
    assert w.sample("run", "new").state is State.RUNNING
    assert w.sample("run", "newer").state is State.QUEUED


def test_slots_are_shared_round_robin_and_bounded_by_concurrency(harness: Build) -> None:
    """Over the open runs; an optional `concurrency` bounds a run."""
    w = harness(slots=6)
    w.open("a", {f"p{i}": (2, 1, -9) for i in range(9)}, quota=9)
    w.open("b", {f"p{i}": (2, 1, -9) for i in range(9)}, quota=9, concurrency=2)
    w.open("c", {f"p{i}": (2, 1, -9) for i in range(9)}, quota=9)
    w.step()
    assert {name: run.running for name, run in w.ledger.runs.items()} == {"a": 2, "b": 2, "c": 2}
    w.stop("c")
    w.step(2)
    assert {name: run.running for name, run in w.ledger.runs.items()} == {"a": 4, "b": 2, "c": 0}


def test_runs_share_a_single_slot_round_robin(harness: Build) -> None:
    """Round-robin also over steps."""
    w = harness(slots=1)
    for run in ("a", "b"):
        w.open(run, {f"p{i}": (2, 1, -1) for i in range(20)}, quota=20)
    w.step(40)
    finished = [w.ledger.runs[run].finished for run in ("a", "b")]
    assert min(finished) >= 5
    assert abs(finished[0] - finished[1]) <= 1


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_stock_requests_and_rounds_both_progress(harness: Build, slots: int) -> None:
    """Both wait for slots all the time, and neither starves."""
    w = harness(slots=slots)
    w.open("run", {f"p{i}": (2, 1, -4) for i in range(100)}, quota=100)
    foreign_requests = []
    for _ in range(100):
        while w.engine.foreign_waiting() < 3:
            name = f"s{len(foreign_requests)}"
            foreign_requests.append(w.do(lambda e, name=name: e.add_foreign_request(name, 3, 2, 4)))
        w.step()
    done = sum(s.reason is not None for s in foreign_requests), w.ledger.runs["run"].finished
    assert min(done) > 0.1 * sum(done), done
