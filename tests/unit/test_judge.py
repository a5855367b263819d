"""`count: accepted` and `judge`, on the fake engine and through the routes."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from sglang_april.api import messages
from sglang_april.scheduler.state import State
from tests.unit.controller_harness import Build, ids, lengths
from tests.unit.http_app import client_of, open_round, run
from tests.unit.scripted_engine import prompt, service

# --- in the scheduler


def test_the_quota_counts_what_is_accepted(harness: Build) -> None:
    """Generation continues until then; rejected groups are delivered with their verdict, and the rest is carried."""
    w = harness()
    w.open("run", lengths(1, 2, 3, 30), quota=2, count="accepted")
    w.step(8)
    assert w.judge("run", {"p0": True, "p1": False}) == 200
    w.step(2)
    assert not w.replies
    assert w.judge("run", {"p2": True}) == 200
    reply = w.reply()
    assert (reply.end_reason, [(d.id, d.accepted) for d in reply.deliver]) == (
        "quota",
        [("p0", True), ("p1", False), ("p2", True)],
    )
    assert w.sample("run", "p3").state is State.SUSPENDED


def test_accepted_beyond_the_quota_and_unjudged_groups_are_surplus(harness: Build) -> None:
    """Accepted surplus counts at once in the next round that counts accepted ones."""
    w = harness()
    w.open("run", lengths(1, 1, 1, 30), quota=1, count="accepted")
    w.step(5)
    assert w.judge("run", {"p0": True, "p1": True}) == 200
    assert ids(w.reply()) == ["p0"]
    w.open("run", {}, quota=1, count="accepted")
    assert [(d.id, d.accepted) for d in w.replies[-1].deliver] == [("p1", True)]
    w.open("run", {}, quota=1)
    assert [(d.id, d.accepted) for d in w.replies[-1].deliver] == [("p2", None)]


def test_surplus_return_delivers_unjudged_groups_too(harness: Build) -> None:
    w = harness()
    w.open("run", lengths(1, 1, 30), quota=1, count="accepted", surplus="return")
    w.step(5)
    w.judge("run", {"p1": True})
    assert [(d.id, d.accepted) for d in w.reply().deliver] == [("p0", None), ("p1", True)]


def test_a_stop_leaves_unjudged_groups_in_the_carry_unless_it_names_them(harness: Build) -> None:
    """Finished but unjudged ones at the end are surplus."""
    w = harness()
    w.open("run", lengths(1, 1, 1, 30), quota=2, count="accepted")
    w.step(5)
    w.judge("run", {"p0": True})
    w.stop("run")
    assert ids(w.replies[-1]) == ["p0"]
    answer = w.open("run", {}, quota=2, count="accepted")
    assert answer.data["unjudged"] == ["p1", "p2"]
    w.stop("run", ["p2", "p3"])
    assert [(d.id, d.accepted) for d in w.replies[-1].deliver] == [("p2", None)]


@pytest.mark.parametrize("quota", [None, 5])
def test_a_round_waits_for_the_last_verdict(harness: Build, quota: int | None) -> None:
    """`exhausted` when everything has finished and been judged."""
    w = harness()
    w.open("run", lengths(1, 2), quota=quota, count="accepted")
    w.step(10)
    w.judge("run", {"p0": False})
    w.step(3)
    assert not w.replies
    w.judge("run", {"p1": True})
    assert w.replies[-1].end_reason == "exhausted"


def test_judging_is_idempotent_and_all_or_nothing(harness: Build) -> None:
    """A contradiction is 409, an unknown id 404, an unfinished group 409; nothing of such a message is taken."""
    w = harness()
    w.open("run", lengths(1, 1, 30), quota=2, count="accepted")
    w.step(5)
    assert [w.judge("run", {"p0": True}) for _ in range(2)] == [200, 200]
    assert w.judge("run", {"p0": False}) == 409
    assert w.judge("run", {"p1": True, "p2": True}) == 409
    assert w.judge("run", {"p1": True, "unknown": False}) == 404
    w.step(2)
    assert not w.replies
    w.judge("run", {"p1": False})
    w.open("other", lengths(30))
    assert w.judge("other", {"p0": True}) == 409, "its quota counts finished groups"


def test_samples_of_accepted_groups_count_in_units_of_samples(harness: Build) -> None:
    """Verdicts are on whole groups; the quota cuts between their samples."""
    w = harness()
    w.open("run", {"p": (3, 3, 3), "q": (3, 2, 3), "r": (3, 1, -40)}, quota=4, quota_unit="sample", count="accepted")
    w.step(15)
    w.judge("run", {"p": True})
    w.step(2)
    assert not w.replies
    w.judge("run", {"q": True})
    reply = w.reply()
    assert (reply.end_reason, sum(len(d.indices) for d in reply.deliver)) == ("quota", 4)


def test_strict_on_policy_starts_another_group_for_each_rejected_one(harness: Build) -> None:
    """What the quota still needs does not count rejected groups; unjudged ones are not carried with tokens."""
    w = harness()
    w.open("run", lengths(1, 2, 3, 4), quota=2, max_staleness=0, count="accepted")
    w.step(8)
    assert [w.sample("run", f"p{i}").state for i in range(4)] == [State.FINISHED] * 2 + [State.QUEUED] * 2
    w.judge("run", {"p0": False})
    w.step(8)
    assert w.sample("run", "p2").state is State.FINISHED
    w.judge("run", {"p1": True, "p2": True})
    assert ids(w.replies[-1]) == ["p0", "p1", "p2"]


def test_a_verdict_is_forgotten_with_its_group(harness: Build) -> None:
    """A dropped prompt id may come back and is judged anew."""
    w = harness()
    w.open("run", lengths(1, 30), quota=2, count="accepted")
    w.step(4)
    w.judge("run", {"p0": True})
    w.drop("run", ["p0"])
    assert w.extend("run", 0, lengths(1)) == 200
    w.step(4)
    assert w.judge("run", {"p0": False}) == 200


# --- through the routes


async def previews(response: asyncio.Task[httpx.Response]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    *groups, summary = map(json.loads, (await response).text.splitlines())
    return groups, summary


def test_previews_verdicts_and_the_reply() -> None:
    """A finished group is streamed before it counts; the summary names those that were delivered, with verdicts."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            requested = [prompt(id=i) for i in "abc"]
            task = await open_round(client, engine, round_id="r", count="accepted", stream=True, prompts=requested)
            assert engine.opened.spec.count == "accepted"
            engine.finish(engine.opened, ("a", 0), ("b", 0), ("c", 0))
            verdicts = {"accept": ["a"], "reject": ["b"]}
            answer = (await client.post("/april/rounds/r/judge", json=verdicts)).json()
            assert answer == {"round_id": "r", "accepted": 1, "rejected": 1, "late": []}
            assert (engine.commands[-1].accept, engine.commands[-1].reject) == (["a"], ["b"])
            engine.end(engine.opened, ("a", [0]), ("b", [0]), accepted={"a": True, "b": False})
            groups, summary = await previews(task)
            assert [(g["id"], g["accepted"]) for g in groups] == [(i, None) for i in "abc"]
            assert [(d["id"], d["accepted"]) for d in summary["delivered"]] == [("a", True), ("b", False)]
            assert [summary["stats"]["delivered"][k] for k in ("groups", "accepted", "rejected")] == [2, 1, 1]
            # The next round streams the groups that the scheduler reports as whole and not judged.
            engine.answers[messages.OpenRound] = messages.Answer(0, data={"unjudged": ["c"]})
            later = await open_round(client, engine, round_id="s", count="accepted", stream=True)
            engine.end(engine.opened, ("c", [0]), accepted={"c": True})
            assert [g["id"] for g in (await previews(later))[0]] == ["c"]

    run(scenario())


def test_the_same_verdict_again_is_fine_even_after_the_end_and_another_is_not() -> None:
    """Judging is idempotent; a caller that lost the answer asks again."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", count="accepted", prompts=[prompt(id="a")])
            engine.finish(engine.opened, ("a", 0))
            first = await client.post("/april/rounds/r/judge", json={"accept": ["a"]})
            engine.end(engine.opened, ("a", [0]), accepted={"a": True})
            await task
            engine.answers[messages.JudgeRound] = messages.Answer(0, 409, "round_id", "round r has ended")
            again = await client.post("/april/rounds/r/judge", json={"accept": ["a"]})
            assert (first.status_code, again.status_code, first.json()) == (200, 200, again.json())
            other = await client.post("/april/rounds/r/judge", json={"reject": ["a"]})
            assert other.status_code == 409
            late = await client.post("/april/rounds/r/judge", json={"accept": ["a", "b"], "reject": ["c"]})
            assert (late.status_code, late.json()) == (200, {**first.json(), "late": ["b", "c"]})

    run(scenario())
