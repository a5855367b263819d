"""`kv: auto` on the controller: which KV is kept, recomputed or not copied, and what the reply reports."""

from typing import Any

import pytest

from sglang_april.api import messages
from tests.unit.controller_harness import Build, ControllerHarness, lengths
from tests.unit.fake_engine import FakeEngine
from tests.unit.test_pressure import tiers as tiers_of

DEAR_COPIES = messages.Rates(1e-6, 0.0, {"host": (1.0, 1.0), "disk": (1.0, 1.0)})
CHEAP_COPIES = messages.Rates(1.0, 0.0, {"host": (1e-6, 1e-6), "disk": (1e-6, 1e-6)})


def send_rates(w: ControllerHarness, rates: messages.Rates) -> None:
    """Broadcast the rates to all replicas."""
    w.do(lambda e: e.controller.observe(rates))


def push(w: ControllerHarness, times: int = 1) -> None:
    for _ in range(times):
        assert (w.push_begin(), w.push_end()) == (200, 200)


def finish(w: ControllerHarness, **spec: Any) -> dict[str, Any]:
    """The stats of a round that finishes everything."""
    w.open("run", {}, **{"quota": None, "kv": "auto", **spec})
    return w.reply().stats


def provenance(w: ControllerHarness, name: str) -> list[str]:
    return [s.kv for (key, _), s in w.samples.items() if key[1] == name for s in s.spans]


@pytest.mark.parametrize(
    ("rates", "kept", "recomputed"),
    [(None, {"host": 2}, {}), (CHEAP_COPIES, {"host": 2}, {}), (DEAR_COPIES, {}, {"cheaper": 2})],
)
def test_the_cheaper_of_load_and_recompute_is_chosen_and_reported(
    harness: Build, rates: messages.Rates | None, kept: dict[str, int], recomputed: dict[str, int]
) -> None:
    """Without rates, `auto` decides as `keep`."""
    w = harness()
    if rates is not None:
        send_rates(w, rates)
    w.open("run", lengths(1, 20, 30), quota=1, kv="auto", tier="host")
    w.reply()
    assert set(tiers_of(w, "run").values()) == {"host"}
    push(w)
    stats = finish(w)
    assert stats["kv_decisions"] == {"keep": kept, "recompute": recomputed}
    assert (stats["kv_cost"] is None) == (rates is None)
    assert (stats["resumed_kept"], stats["resumed_recomputed"]) == (sum(kept.values()), sum(recomputed.values()))
    assert stats["kv_fallback"] == 0
    assert provenance(w, "p1") == ["fresh", "kept" if kept else "recomputed"]


def test_only_short_samples_are_recomputed(harness: Build) -> None:
    """Attention makes the recompute of long samples expensive."""
    w = harness()
    send_rates(w, messages.Rates(0.0, 1.0, {"host": (10.0, 10.0)}))  # back: from 10 tokens on
    w.open("run", {"short": (3, 1, -20), "long": (40, 1, -20), "q": (3, 1, -1)}, quota=1, kv="auto", tier="host")
    w.reply()
    push(w)
    assert finish(w)["kv_decisions"] == {"keep": {"host": 1}, "recompute": {"cheaper": 1}}
    assert (provenance(w, "short"), provenance(w, "long")) == (["fresh", "recomputed"], ["fresh", "kept"])


def test_pages_that_never_left_the_device_cost_nothing(harness: Build) -> None:
    w = harness()
    send_rates(w, DEAR_COPIES)
    w.open("run", lengths(1, 20), quota=1, kv="auto")
    w.reply()
    push(w)
    assert finish(w)["kv_decisions"] == {"keep": {"device": 1}, "recompute": {}}


def test_kv_of_the_current_version_is_kept_without_a_decision(harness: Build) -> None:
    """Regardless of the rates."""
    w = harness()
    send_rates(w, DEAR_COPIES)
    w.open("run", lengths(1, 20), quota=1, kv="auto", tier="host")
    w.reply()
    stats = finish(w)
    assert stats["kv_decisions"] == {"keep": {}, "recompute": {}}
    assert stats["resumed_kept"] == 1
    assert provenance(w, "p1") == ["fresh"]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_kv_older_than_the_bound_is_never_kept(harness: Build, tier: str) -> None:
    """Even if keeping it costs nothing."""
    w = harness()
    send_rates(w, CHEAP_COPIES)
    w.open("run", lengths(1, 20, 20), quota=1, kv="auto", tier=tier, max_staleness=2)
    w.reply()
    push(w, 3)
    assert finish(w, max_staleness=2)["kv_decisions"] == {"keep": {}, "recompute": {"stale": 2}}


def test_kv_that_a_push_makes_old_is_not_copied_if_a_recompute_is_cheaper(harness: Build) -> None:
    """A flush inside a push makes no copy that the resume would discard; outside of a push it does."""
    for rates, pushing, there in (
        (DEAR_COPIES, True, "none"),
        (DEAR_COPIES, False, "host"),
        (CHEAP_COPIES, True, "host"),
    ):
        w = harness()
        send_rates(w, rates)
        w.open("run", lengths(1, 20), quota=1, kv="auto")
        w.reply()
        if pushing:
            assert w.push_begin() == 200
        assert w.do(FakeEngine.flush)
        assert tiers_of(w, "run") == {"p1": there}
        if not pushing:
            assert w.push_begin() == 200
        assert w.push_end() == 200
        stats = finish(w)
        dear = rates is DEAR_COPIES
        assert stats["kv_decisions"] == {
            "keep": {} if dear else {"host": 1},
            "recompute": {"cheaper": 1} if dear else {},
        }
        assert stats["kv_fallback"] == 0


def flush_in_a_push(w: ControllerHarness, kv: str) -> str:
    """The tier of a device partial after a flush inside a push."""
    w.open("run", lengths(1, 20), quota=1, kv=kv)
    w.reply()
    assert w.push_begin() == 200
    assert w.do(FakeEngine.flush)
    assert w.push_end() == 200
    return tiers_of(w, "run")["p1"]


def test_another_policy_ignores_the_rates(harness: Build) -> None:
    """`keep` copies and loads at any cost; KV that an earlier `auto` round discarded counts as fallback."""
    w = harness()
    send_rates(w, DEAR_COPIES)
    assert flush_in_a_push(w, "keep") == "host"
    stats = finish(w, kv="keep")
    assert (stats["resumed_kept"], stats["kv_decisions"]) == (1, {"keep": {}, "recompute": {}})
    assert flush_in_a_push(w, "auto") == "none"
    stats = finish(w, kv="keep")
    assert (stats["resumed_recomputed"], stats["kv_fallback"]) == (1, 1)


def test_rates_apply_from_the_step_in_which_they_arrive(harness: Build) -> None:
    """Rates can arrive between any two steps, repeatedly; replicas agree, and each sample is decided once."""
    for before in range(8):
        w = harness(slots=8, copy_delay=2)
        w.open("run", lengths(2, 20, 30, 25, 22), quota=1, kv="auto", tier="host")
        w.reply()
        push(w)
        w.open("run", {}, quota=None, kv="auto")
        w.step(before)
        send_rates(w, DEAR_COPIES)
        w.step()
        send_rates(w, CHEAP_COPIES)
        stats = w.reply().stats
        decided = stats["kv_decisions"]
        assert sum(decided["keep"].values()) + sum(decided["recompute"].values()) == 4
        assert decided["recompute"].get("no_pages", 0) == 0
        assert stats["kv_cost"]["token_s"] == CHEAP_COPIES.token_s


@pytest.mark.parametrize("kv_pages", ["full", "int8"])
def test_kv_restored_from_int8_pages_is_never_fresh(harness: Build, kv_pages: str) -> None:
    """Without a push: `kept` from the resume on, also after another suspend on the device."""
    w = harness()
    for engine in w.engines:
        engine.kv_pages = kv_pages
    w.open("run", lengths(2, 30), quota=1, tier="host")
    w.reply()
    w.open("run", {"p2": (3, 1, -2)}, quota=1, tier="device")
    w.reply()
    w.open("run", {"p3": (3, 1, -2)}, quota=1)
    w.reply()
    spans = [(s.version, s.kv) for s in w.sample("run", "p1").spans]
    assert spans == ([(0, "fresh")] if kv_pages == "full" else [(0, "fresh"), (0, "kept")])
