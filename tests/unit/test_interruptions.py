"""Pauses, flushes, releases of memory, aborts and retracts: what interrupts samples apart from a push."""

import pytest

from sglang_april.api import messages
from sglang_april.scheduler import report
from sglang_april.scheduler.state import Proximal, State
from sglang_april.scheduler.version_clock import UNNAMED
from tests.unit.controller_harness import Build, ids, lengths, spans
from tests.unit.fake_engine import FakeEngine


def test_a_paused_round_continues_unchanged(harness: Build) -> None:
    """No rollout sample steps while paused, stock requests do, and no span opens."""
    w = harness()
    w.open("run", lengths(9), quota=1)
    w.step(3)
    w.freeze(True)
    before = w.sample("run", "p0").length
    w.do(lambda e: e.add_foreign_request("s", 0, 3, 5))
    w.step(12)
    assert w.engine.fully_idle()
    assert w.sample("run", "p0").length == before
    w.freeze(False)
    assert ids(w.reply()) == ["p0"]
    assert spans(w, "p0") == [(0, "fresh")]


def test_a_flush_moves_pages_to_the_host_within_its_cap(harness: Build) -> None:
    """The longest first; samples without room keep their tokens."""
    w = harness(host_cap=12)
    w.open("run", {f"p{i}": (3 + i, 1, -20) for i in range(4)} | {"q": (3, 1, -1)}, quota=1)
    w.reply()
    held = {f"p{i}": w.sample("run", f"p{i}").kv.pages.length for i in range(4)}
    assert w.do(FakeEngine.flush)
    kept = {name for name in held if w.sample("run", name).kv.pages is not None}
    capacity, expected = 12, set()
    for name in sorted(held, key=held.__getitem__, reverse=True):
        if held[name] <= capacity:
            expected.add(name)
            capacity -= held[name]
    assert kept == expected
    assert 0 < len(kept) < 4
    w.open("run", {}, quota=None)
    reply = w.reply()
    assert (reply.stats["resumed_kept"], reply.stats["kv_fallback"]) == (len(kept), 4 - len(kept))
    assert sorted(ids(reply)) == sorted(held)


def test_a_waiting_flush_keeps_samples_suspended(harness: Build) -> None:
    """`flush_cache?timeout=`; afterwards the round continues."""
    w = harness()
    w.open("run", lengths(9), quota=1)
    w.do(lambda e: e.add_foreign_request("s", 4, 3, 5))
    w.step()
    assert not w.do(lambda e: e.flush(wait=True))
    length = w.sample("run", "p0").length
    while w.engine.flush_pending:
        assert w.sample("run", "p0").state in (State.SUSPENDED, State.QUEUED)
        assert w.sample("run", "p0").length == length
        w.step()
    assert ids(w.reply()) == ["p0"]


def test_released_memory_closes_admission_also_across_a_push(harness: Build) -> None:
    """Pages are on the host before the pool is unmapped; no page is touched until it is back."""
    w = harness()
    w.open("run", lengths(1, 9), quota=1)
    w.reply()
    assert w.do(FakeEngine.release_memory)
    assert w.sample("run", "p1").kv.pages.tier == "host"
    assert w.open("run", {}).status == 503
    assert (w.push_begin(), w.push_end()) == (200, 200)
    answer = w.open("run", {})
    assert (answer.status, "memory is released" in answer.reason) == (503, True)
    w.do(lambda e: e.released.clear())
    w.open("run", {})
    assert ids(w.reply()) == ["p1"]
    assert spans(w, "p1") == [(0, "fresh"), (1, "kept")]


@pytest.mark.parametrize("named", [0, None])
def test_lost_weights_close_admission_until_a_push(harness: Build, named: int | None) -> None:
    """Stock requests meanwhile leave no KV that a request after the push finds."""
    w = harness()
    w.open("run", lengths(1, 9), quota=1)
    w.reply()
    w.do(lambda e: e.controller.weights_lost())
    assert (w.engine.version, w.engine.renewed_for) == (UNNAMED, UNNAMED)  # also for requests that wait
    answer = w.open("run", {})
    assert (answer.status, "weights are lost" in answer.reason) == (503, True)
    assert report.state(w.controller.context)["unnamed"]
    assert (w.push_begin(named), w.push_end()) == (200, 200)
    assert (w.version, w.engine.version) == (1 if named is None else named,) * 2
    w.open("run", {})
    assert ids(w.reply()) == ["p1"]


def test_a_bucket_of_lost_weights_outside_of_a_push_lets_nothing_step(harness: Build) -> None:
    """It may not be the last. Under a pause it may move the version, because nothing steps until its end."""
    w = harness()
    w.open("run", lengths(9), quota=1)
    w.step(3)
    w.do(lambda e: e.controller.interrupt())
    w.do(lambda e: e.controller.weights_lost())
    length = w.sample("run", "p0").length
    for version in (0, 1):
        w.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
        w.step(3)
        assert (w.sample("run", "p0").length, w.version) == (length, version)
        w.freeze(not w.frozen)
    assert ids(w.reply()) == ["p0"]


def test_the_state_names_each_reason_against_rounds(harness: Build) -> None:
    """`closed` names the first of them; a trainer must know whether weights are missing behind it."""
    w = harness()
    assert w.do(FakeEngine.release_memory)
    w.do(lambda e: e.weight_call(ok=False, whole=False, flush=False))
    w.controller.context.clock.unnamed = True
    state = report.state(w.controller.context)
    assert ("memory is released" in state["closed"], state["failed"], state["unnamed"]) == (True, "failed", True)


def test_an_abort_of_all_requests_stops_rounds_and_keeps_the_carry(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(1, 9), quota=1)
    w.reply()
    w.open("other", lengths(1, 9), quota=None)
    w.step(3)
    for known in w.rounds.values():
        known.stop = messages.StopRound(0, known.spec.round_id)
    w.do(lambda e: e.controller.abort_everything())
    assert w.replies[-1].end_reason == "stopped"
    assert (ids(w.replies[-1]), w.replies[-1].run) == (["p0"], "other")
    assert [w.sample(run, "p1").state for run in ("run", "other")] == [State.SUSPENDED] * 2


def test_retracted_samples_are_recomputed_under_one_version(harness: Build) -> None:
    """A retract gives `recomputed` without any push, and counts as retracted."""
    w = harness()
    w.open("run", lengths(9, 9), quota=2)
    w.step(4)
    w.do(lambda e: setattr(e, "retract_next", True))
    reply = w.reply()
    assert (reply.stats["retracted"], reply.stats["reprefilled_tokens"] > 3) == (1, True)
    assert sorted([spans(w, "p0"), spans(w, "p1")]) == [[(0, "fresh")], [(0, "fresh"), (0, "recomputed")]]


@pytest.mark.parametrize("wanted", [True, False])
def test_retract_renews_or_discards_proximal_logprobs(harness: Build, wanted: bool) -> None:
    """Values collected under an older policy are not mixed with those of the prefill after a retract."""
    w = harness()
    w.open("run", lengths(9, 9), quota=2, proximal=wanted)
    w.step(4)
    for name in ("p0", "p1"):
        w.sample("run", name).recompute.proximal = Proximal(0, [(0, None)])
    w.push_begin(version=3)
    w.do(lambda e: e.weight_call(ok=True, whole=False, flush=False))
    w.push_end()
    w.step(3)
    w.do(lambda e: setattr(e, "retract_next", True))
    w.step()
    collected = [w.sample("run", name).recompute.proximal for name in ("p0", "p1")]
    (renewed,) = [x for x in collected if x is None or x.version == 3]
    assert (renewed is not None) == wanted
    assert renewed is None or renewed.parts == []
