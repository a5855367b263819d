"""What drops and the ends of rounds delete of trajectories, and what is left."""

import pytest

from sglang_april.api import messages
from tests.unit.leg_harness import PROMPT, LegHarness


@pytest.fixture(params=[False, True], ids=["normal", "overlap"])
def w(request: pytest.FixtureRequest) -> LegHarness:
    return LegHarness(overlap=request.param, slots=4)


def test_drop_deletes_done_and_pending_trajectories(w: LegHarness) -> None:
    w.open("run", None)
    w.leg("run", "a", PROMPT, 2, "a")
    w.leg("run", "b", PROMPT, 30, "b")
    w.step(8)
    w.done("run", "a")
    assert w.command(messages.Drop, run="run").data["trajectories"] == 2
    assert w.context.trajectories["run"].active == {}
    w.step(3)
    assert not w.running()


def test_a_drop_ends_the_wait_for_what_it_deletes(w: LegHarness) -> None:
    for name in ("a", "b"):
        w.leg("run", name, PROMPT, 2, name)
    w.step(5)
    w.push()
    w.open("run", 1, max_staleness=1)
    w.done("run", "a")
    assert not w.of(messages.RoundEnded), "b is at the bound"
    w.command(messages.Drop, run="run", ids=["b"])
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.end_reason, reply.trajectories) == ("quota", ["a"])


def test_what_leaves_with_a_delivered_group_is_not_carried(w: LegHarness) -> None:
    w.open("run", 1, quota_unit="group", n=2)
    for name in ("a", "b", "c"):
        w.leg("run", name, PROMPT, 30 if name == "c" else 2, name, "g")
    w.step(8)
    w.done("run", "a", "b")
    (reply,) = w.of(messages.RoundEnded)
    assert (reply.trajectories, reply.rejected) == (["a", "b"], ["c"])
    assert w.ended("c") is not None
    assert reply.carried["trajectories"] == []
    assert {key: reply.carried[key] for key in ("groups", "samples", "tokens")} == {
        "groups": 0,
        "samples": 0,
        "tokens": 0,
    }
    assert reply.stats["carried_out"]["samples"] == 0
    assert reply.carried_lengths == b""
