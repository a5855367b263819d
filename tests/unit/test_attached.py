"""Attached requests without trajectories on the fake engine, at moments that a live server rarely meets."""

from collections.abc import Callable

import numpy as np
import pytest

from sglang_april.api import messages
from sglang_april.api.messages import Span
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


Rounds = list[tuple[str, str]]
"""Rounds that have ended: what they count, and their `kv`."""


@pytest.mark.parametrize(
    ("before", "inside", "provenance"),
    [
        ([], [], "recomputed"),
        ([("sample", "keep")], [], "kept"),
        ([("trajectory", "keep")], [], "kept"),
        ([("sample", "recompute"), ("trajectory", "keep")], [], "kept"),
        ([("trajectory", "keep"), ("sample", "recompute")], [], "recomputed"),
        ([], [("sample", "keep")], "kept"),
        ([("sample", "keep")], [("trajectory", "recompute")], "recomputed"),
    ],
)
def test_the_kv_policy_is_that_of_the_latest_round_of_its_run(before: Rounds, inside: Rounds, provenance: str) -> None:
    """`inside`: rounds that begin and end while the request runs. Without a round, `--april-kv` decides."""
    w = LegHarness(slots=4)
    for e in w.engines:
        e.controller.context.attached_kv = "recompute"
    for unit, kv in before:
        rounds(w, "agents", unit, kv)
    w.leg("agents", "a", PROMPT, 9)
    w.leg("others", "b", PROMPT, 9)
    w.step(3)
    for unit, kv in inside:
        rounds(w, "agents", unit, kv)
    w.push()
    w.step(20)
    assert spans(w, "a") == [(0, "fresh"), (1, provenance)]
    assert spans(w, "b") == [(0, "fresh"), (1, "recomputed")]


def test_policies_of_the_latest_runs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_april.scheduler.context.MAX_RUNS", 2)
    w = LegHarness()
    for run in ("a", "b", "a", "c"):
        rounds(w, run, "sample", "keep")
    assert [list(e.controller.context.kv_of_run) for e in w.engines] == [["a", "c"]] * len(w.engines)


@pytest.mark.parametrize(("trajectory_round", "prefilled"), [(False, 1 + 1), (True, len(PROMPT) + 3 + 1)])
def test_legs_follow_rounds_of_prompts_until_one_of_trajectories(trajectory_round: bool, prefilled: int) -> None:
    w = LegHarness(slots=4)
    for e in w.engines:
        e.controller.context.attached_kv = "recompute"
    if trajectory_round:
        w.open("agents", None, kv="recompute")
    w.leg("agents", "a", PROMPT, 3, "t")
    w.step(8)
    rounds(w, "agents", "sample", "keep")
    w.push()
    w.leg("agents", "b", [*w.sequence("a"), 1], 3, "t")
    w.step(8)
    leg = w.ended("b")
    assert leg is not None
    assert leg.prefilled == prefilled


def rounds(w: LegHarness, run: str, unit: str, kv: str) -> None:
    """A round of a run that ends at once; without prompts, one of prompts has nothing to wait for."""
    w.open(run, None, quota_unit=unit, trajectories=unit == "trajectory", kv=kv)
    if unit == "trajectory":
        w.stop(run)


@pytest.mark.parametrize("act", [abort_both, lambda e: e.controller.attached.keep_suspended()], ids=["abort", "closed"])
def test_a_request_may_end_in_the_step_in_flight_while_it_is_suspended(act: Act) -> None:
    """Overlap loop: its last token has been drawn and is not processed yet. It has ended, and is not suspended."""
    w = LegHarness(overlap=True)
    w.leg("agents", "a", PROMPT, 3)
    w.leg("agents", "b", PROMPT, 9)
    w.step(3)
    (a, b) = [group.samples[0] for group in w.context.ledger.runs[next(iter(w.context.attached))].groups.values()]
    assert (len(a.request.output), a.request.drawn) == (2, 3), "the last token is in flight"
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


def test_a_request_that_ends_outside_of_a_step_has_all_of_its_tokens_in_spans() -> None:
    """SGLang aborts a running request, for example because the pool has no room for its next token."""
    w = LegHarness()
    w.leg("agents", "a", PROMPT, 50)
    w.step(8)
    for e in w.engines:
        (request,) = e.running
        assert len(request.output) > request.sample.length, "all are counted already"
        e.running.remove(request)
        e.free_slots_of(request)
        e.controller.aborted(request.sample, {"type": "abort"})
    (ended,) = w.answered()
    assert ended.spans == [Span(0, len(request.output), 0, "fresh")]
