"""`count: accepted` with `judge`, and `extend`, on the live server through the clients."""

import asyncio
from collections.abc import Iterator

import pytest

from sglang_april.client import AprilClient, AprilError, AsyncAprilClient
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.support.server import Server
from tests.support.workload import prompt

LONG = 1500
"""Output length of a sample that runs through a whole test."""


@pytest.fixture(params=["normal", "overlap"])
def each_loop(request: pytest.FixtureRequest) -> Server:
    """A server of each scheduler loop."""
    return request.getfixturevalue({"normal": "server", "overlap": "overlap"}[request.param])


@pytest.fixture
def april(each_loop: Server, run: str) -> Iterator[AprilClient]:
    with AprilClient(each_loop.url) as client:
        yield client
        for name in client.state()["http"]["rounds"]:
            client.stop(name)
        client.drop(run)


def status(error: pytest.ExceptionInfo[AprilError]) -> tuple[int, str]:
    return error.value.status, error.value.field


def test_previews_are_judged_during_generation(april: AprilClient, run: str) -> None:
    """DAPO's dynamic sampling in one round: every second group is rejected, and the quota counts the others."""
    prompts = [prompt(f"p{i}", 4 + 3 * i, n=2) for i in range(8)] + [prompt("long", LONG)]
    name = f"{run}-r"
    seen: list[str] = []
    late = 0
    for event in april.stream(run=run, round_id=name, prompts=prompts, quota=3, count="accepted"):
        if isinstance(event, RolloutSummary):
            break
        assert isinstance(event, RolloutGroup)
        assert event.accepted is None
        assert len(event.samples) == 2
        seen.append(event.id)
        good = int(event.id[1:]) % 2 == 1
        reported = april.judge(name, accept=[event.id] if good else [], reject=[] if good else [event.id])
        late += len(reported["late"])  # the round is over, and what had finished before is shown all the same
        assert reported["accepted"] + reported["rejected"] + late == len(seen)
    assert (event.end_reason, seen[:6]) == ("quota", [f"p{i}" for i in range(6)])
    assert [(d["id"], d["accepted"]) for d in event.delivered] == [(f"p{i}", i % 2 == 1) for i in range(6)]
    assert [group.id for group in event.groups] == [d["id"] for d in event.delivered]
    assert (event.stats["delivered"]["accepted"], event.stats["delivered"]["rejected"]) == (3, 3)
    assert {p["id"] for p in april.partials(run)["partials"]} <= {"p6", "p7", "long"}
    reply = april.get_round(name)
    assert reply is not None
    assert [(g.id, g.accepted) for g in reply.finished] == [(f"p{i}", i % 2 == 1) for i in range(6)]
    # What had finished without a verdict is first in the next reply.
    left = april.rollout(run=run, prompts=[], quota=2)
    assert [(g.id, g.accepted) for g in left.finished] == [("p6", None), ("p7", None)]


def test_judge_and_extend_refusals_change_nothing(april: AprilClient, run: str) -> None:
    """A refused message has no effect; repeating a verdict is allowed."""
    name = f"{run}-r"
    prompts = [prompt("a", 3), prompt("b", 3), prompt("long", LONG)]
    events = april.stream(run=run, round_id=name, prompts=prompts, quota=2, count="accepted")
    assert {next(events).id, next(events).id} == {"a", "b"}
    assert [april.judge(name, reject=["a"])["rejected"] for _ in range(2)] == [1, 1]
    for ids, expected in (
        ({"accept": ["a"]}, (409, "accept[0]")),
        ({"accept": ["b", "long"]}, (409, "accept[1]")),
        ({"accept": ["b"], "reject": ["unknown"]}, (404, "reject[0]")),
        ({"accept": ["b"], "reject": ["b"]}, (400, "reject[0]")),
    ):
        with pytest.raises(AprilError) as error:
            april.judge(name, **ids)
        assert status(error) == expected
    with pytest.raises(AprilError) as error:
        april.extend(name, prompts=[prompt("new", 3), prompt("a", 3)])
    assert status(error) == (409, "prompts[1].id")
    more = {"quota_add": 1, "prompts": [prompt("new", 3)], "idempotency_key": "more"}
    assert april.extend(name, **more) == april.extend(name, **more), "the same key is the same extend"
    assert next(events).id == "new"
    april.stop(name)
    *_, summary = events
    assert [(d["id"], d["accepted"]) for d in summary.delivered] == [("a", False)]
    assert april.judge(name, reject=["a"])["rejected"] == 1
    assert april.extend(name, **more)["quota"] == 3
    assert april.judge(name, accept=["b"])["late"] == ["b"]
    with pytest.raises(AprilError) as error:
        april.extend(name, quota_add=1)
    assert status(error) == (409, "round_id")


def test_extend_with_the_async_client(server: Server, run: str) -> None:
    """`extend` adds prompts and raises the quota of an open round; without it the round ends once all is judged."""

    async def scenario() -> None:
        async with AsyncAprilClient(server.url) as april:
            name = f"{run}-r"
            body = {"run": run, "round_id": name, "prompts": [prompt("a", 3)], "quota": 1, "count": "accepted"}
            events = april.stream(**body)
            assert (await anext(events)).id == "a"
            reported = await april.extend(name, quota_add=1, prompts=[prompt("b", 3, n=2), prompt("long", LONG)])
            assert (reported["quota"], reported["counted"]) == (2, 0)
            assert (await april.judge(name, accept=["a"]))["accepted"] == 1
            assert (await anext(events)).id == "b"
            await april.judge(name, accept=["b"])
            summary = await anext(events)
            assert [(d["id"], len(d["indices"])) for d in summary.delivered] == [("a", 1), ("b", 2)]
            assert summary.end_reason == "quota"
            await april.drop(run)

    asyncio.run(scenario())
