"""Attached requests without trajectories on the fake engine, at moments that a live server rarely meets."""

from collections.abc import Callable

import pytest

from sglang_april.api import messages
from sglang_april.scheduler.state import State
from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness

Act = Callable[[FakeEngine], None]


def abort_both(e: FakeEngine) -> None:
    e.controller.attached.abort(e.controller.attached.named(lambda _: True))


def spans(w: LegHarness, rid: str) -> list[tuple[int, str]]:
    (ended,) = [event for event in w.of(messages.AttachedEnded) if event.rid == rid]
    return [(span.version, span.kv) for span in ended.spans]


def test_a_request_that_arrives_before_the_end_of_a_push_is_drawn_under_the_new_version() -> None:
    """No step is between the two messages (`span-provenance`)."""
    w = LegHarness()
    w.command(messages.PushBegin)
    w.leg("agents", "a", PROMPT, 5)
    w.command(messages.PushEnd)
    w.step(10)
    assert spans(w, "a") == [(1, "fresh")]


@pytest.mark.parametrize("act", [abort_both, lambda e: e.controller.attached.keep_suspended()], ids=["abort", "closed"])
def test_a_request_may_end_in_the_step_in_flight_while_it_is_suspended(act: Act) -> None:
    """Overlap loop: its last token has been drawn and is not processed yet. It has ended, and is not suspended."""
    w = LegHarness(overlap=True)
    w.leg("agents", "a", PROMPT, 3)
    w.leg("agents", "b", PROMPT, 9)
    w.step(3)
    (a, b) = [group.samples[0] for group in w.context.ledger.runs[next(iter(w.context.attached))].groups.values()]
    assert (a.length, a.request.drawn) == (2, 3), "the last token is in flight"
    w.do(act)
    assert a.state is State.FINISHED
    assert spans(w, "a") == [(0, "fresh")]
    w.step(12)
    assert spans(w, "b") == [(0, "fresh")]
    assert b.state is State.FINISHED
    assert not w.context.ledger.runs
