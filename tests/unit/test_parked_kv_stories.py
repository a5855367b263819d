"""Random stories of trajectories whose KV is parked; replicas decide alike."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_april.api import messages
from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["leg", "edit", "push", "begin", "end", "flush", "freeze", "thaw", "done", "reject", "abort",
                         "open", "stop", "step", "steps"]),
        st.integers(0, 3),
        st.integers(1, 9),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(EVENTS, st.booleans(), st.sampled_from(["keep", "recompute", "auto"]), st.sampled_from([40, 90, 300]))
def test_any_story_answers_every_request_once(events: list[Any], overlap: bool, kv: str, pool: int) -> None:
    """Replicas decide alike, no slot is lost or shared, every request ends once, and no KV has a hole."""
    w = LegHarness(overlap=overlap, slots=3, pool=pool, host_cap=50, copy_delay=2)
    sent = sum(_event(w, *event, kv) for event in events)
    w.command(messages.Thaw)
    if w.context.clock.closed:
        w.command(messages.PushEnd)
    w.open("run", None, kv=kv)
    for _ in range(2000):
        if not _pending(w):
            break
        w.step()
    assert not _pending(w), "a request is never answered"
    rids = [leg.rid for leg in w.of(messages.LegEnded)]
    assert len(rids) == len(set(rids)) == sent
    w.command(messages.Drop, run="run")
    w.step(5)
    assert len(w.engine.free) == w.engine.pool


def _pending(w: LegHarness) -> list[Any]:
    known = w.context.trajectories.get("run")
    return [s for t in known.active.values() for s in t.pending] if known is not None else []


def _event(w: LegHarness, what: str, which: int, size: int, kv: str) -> bool:
    """Returns whether a request was sent that is not refused."""
    name = f"t{which}"
    if what in ("leg", "edit"):
        return _next_turn(w, name, size, edited=what == "edit")
    pending = [p.group.id.partition(":")[2] for p in _pending(w)]
    open_round = any(r.spec.run == "run" for r in w.context.rounds.values())
    acts: dict[str, Callable[[], object]] = {
        "push": w.push,
        "begin": lambda: w.command(messages.PushBegin),
        "end": lambda: w.command(messages.PushEnd),
        "flush": lambda: w.do(FakeEngine.flush),
        "freeze": lambda: w.command(messages.Freeze),
        "thaw": lambda: w.command(messages.Thaw),
        "done": lambda: w.done("run", name),
        "reject": lambda: w.done("run", reject=(name,)),
        "abort": lambda: pending and w.abort(pending[which % len(pending)]),
        "open": lambda: w.open("run", size, kv=kv),
        "stop": lambda: open_round and w.stop("run"),
        "step": w.step,
        "steps": lambda: w.step(size),
    }
    acts[what]()
    return False


def _next_turn(w: LegHarness, name: str, size: int, *, edited: bool) -> bool:
    ended = [leg for leg in w.of(messages.LegEnded) if leg.trajectory == name]
    history = w.sequence(ended[-1].rid) if ended else PROMPT
    if edited:
        history = history[: max(1, len(history) - size)]
    if len(history) + size + 4 >= w.engine.pool // 2:
        return False
    return w.leg("run", f"r{len(w.rids)}", [*history, size], size, name)
