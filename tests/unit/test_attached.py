"""Attached requests without trajectories on the fake engine, at moments that a live server rarely meets."""

from collections.abc import Callable

import numpy as np
import pytest

from sglang_april.api import messages
from sglang_april.scheduler.state import State
from tests.unit.fake_engine import FakeEngine
from tests.unit.leg_harness import PROMPT, LegHarness

Act = Callable[[FakeEngine], None]


def abort_both(e: FakeEngine) -> None:
    e.controller.attached.abort(e.controller.attached.named(lambda _: True))


def spans(w: LegHarness, rid: str) -> list[tuple[int, str]]:
    (ended,) = [event for event in w.answered() if event.rid == rid]
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


@pytest.mark.parametrize("names", [(), ("t",)], ids=["request", "leg"])
def test_the_audit_gets_requests_that_were_not_aborted(names: tuple[str, ...]) -> None:
    """Prompt, tokens, logprobs and spans, under the names that the caller knows (`audited-logprobs`)."""
    w = LegHarness()
    w.context.audited = w.engines[1].controller.context.audited = True
    w.leg("agents", "a", PROMPT, 5, *names)
    w.leg("agents", "b", PROMPT, 50, *names)
    w.step(8)
    w.abort("b")
    drawn = {event.rid: event.drawn for event in w.answered()}
    assert drawn["b"] is None
    assert drawn["a"] is not None
    prompt, sample = drawn["a"]
    assert (sample.run, sample.id, len(sample.output_ids)) == ("agents", "a", 20)
    assert prompt.input_ids == np.array(PROMPT, "<i4").tobytes()
    assert [(span.start, span.end) for span in sample.spans] == [(0, 5)]
