"""Rounds of trajectories: legs that run ahead, stale trajectories, and what such a round refuses."""

from tests.integration.test_trajectories import PROMPT, done, leg, open_round, pending, turn
from tests.support.live import LiveServer, until


def test_legs_run_ahead_until_their_quotas_wait(live: LiveServer, run: str) -> None:
    """After the reply, until two quotas of done trajectories wait; the following rounds are answered at once."""
    with live.server.slowed():
        reply = open_round(live, run, quota=1, after_quota="continue", ahead=2, round_id=f"{run}-0")
        legs = {name: turn(live, run, name, length=100) for name in "abcd"}
        until(lambda: live.running() == 4, "all run")
        for name, running in {"a": 3, "b": 2, "c": 0}.items():
            live.wait_decodes()
            done(live, run, name)
            until(lambda: live.running() == running, f"{running} run on")  # noqa: B023
            assert live.result_of(legs[name])["meta_info"]["finish_reason"]["type"] == "abort"
        assert [t["id"] for t in live.result_of(reply)["trajectories"]] == ["a"]
        before = len(live.server.forwards())
        assert pending(live, run) == 1
        for number, name in ((1, "b"), (2, "c")):
            reply = open_round(live, run, quota=1, round_id=f"{run}-{number}")
            assert [t["id"] for t in live.result_of(reply)["trajectories"]] == [name]
        assert len(live.server.forwards()) == before
    reply = open_round(live, run, quota=1, round_id=f"{run}-3")
    assert len(live.result_of(legs["d"])["output_ids"]) == 100
    done(live, run, "d")
    live.result_of(reply)


def test_a_stale_trajectory_is_waited_for(live: LiveServer, run: str) -> None:
    leg(live, run, "old", PROMPT)
    live.push(1)
    reply = open_round(live, run, quota=1, max_staleness=1)
    leg(live, run, "new", PROMPT)
    done(live, run, "new")
    (waiting,) = live.server.state()["rounds"]
    assert (waiting["counted"], waiting["mandatory"]) == (1, ["old"])
    assert not reply.done()
    leg(live, run, "older", PROMPT)
    done(live, run, reject=["old"])
    assert [t["id"] for t in live.result_of(reply)["trajectories"]] == ["new"]
    live.push(2)
    reply = open_round(live, run, quota=1, max_staleness=1, round_id=f"{run}-waits", wait_s=0.1)
    leg(live, run, "newer", PROMPT)
    done(live, run, "newer")
    ended = live.result_of(reply)
    assert (ended["end_reason"], [t["id"] for t in ended["trajectories"]]) == ("waited", ["newer"])
    assert [(t["id"], t["mandatory"]) for t in ended["carried"]["trajectories"]] == [("older", True)]


def test_what_a_round_of_trajectories_does_not_have(live: LiveServer, run: str) -> None:
    for body, field in (
        ({"quota_unit": "trajectory", "prompts": [{"id": "p", "input_ids": [1]}]}, "prompts"),
        ({"quota_unit": "trajectory", "n": 2}, "n"),
        ({"quota_unit": "group", "trajectories": True}, "n"),
        ({"trajectories": True, "n": 2}, "quota_unit"),
        ({"quota_unit": "trajectory", "count": "accepted"}, "count"),
        ({"quota_unit": "trajectory", "stream": True}, "stream"),
    ):
        assert live.server.rollout(run=run, status=400, **body)["error"]["field"] == field
    asked = {"input_ids": [PROMPT, PROMPT]}
    answer = live.server.http.post("/generate", json=asked, headers={"x-april-run": run, "x-april-trajectory": "t"})
    assert answer.status_code == 400
    assert "x-april-trajectory" in answer.text


def test_a_push_in_the_middle_of_a_prefill_is_no_retract(live: LiveServer, run: str) -> None:
    ids = [1 + i % 400 for i in range(400)]
    reply = open_round(live, run, quota=1)
    with live.server.slowed(0.3):
        before = len(live.server.forwards())
        answer = live.in_background(leg, live, run, "t", ids)
        until(lambda: len(live.server.forwards()) > before, "the prefill has begun")
        live.push(1)
    live.result_of(answer)
    done(live, run, "t")
    ended = live.result_of(reply)
    prefilled = sum(forward["tokens"] for forward in live.server.forwards()[before:] if not forward["decode"])
    assert prefilled > len(ids), "the push came too late"
    assert ended["stats"]["retracted"] == 0
