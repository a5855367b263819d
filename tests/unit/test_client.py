"""Both clients over real HTTP, against the real routes and a scheduler that finishes everything at once."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from sglang_april.client import (
    AprilClient,
    AprilError,
    AsyncAprilClient,
    NotPatchedError,
    PushLeftOpenError,
)
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.unit.eager_server import eager_server, serve
from tests.unit.scripted_engine import prompt


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with eager_server() as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[AprilClient]:
    with AprilClient(url) as client:
        yield client


def check_group(group: RolloutGroup, requested: dict[str, Any]) -> None:
    assert (group.id, group.complete, group.metadata) == (requested["id"], True, requested["metadata"])
    assert group.prompt_ids.dtype == np.int32
    assert group.prompt_ids.tolist() == [1, 2, 3]
    sample = group.samples[1]
    assert sample.output_ids.tolist() == [97, 98]
    assert sample.logprobs.dtype == np.float32
    assert sample.logprobs.tolist() == np.linspace(-1, -0.1, 2, dtype=np.float32).tolist()
    assert (sample.text, sample.spans[0].kv) == ("ab", "fresh")


def test_a_round_with_numpy_arrays(client: AprilClient) -> None:
    requested = prompt(n=2, metadata={"x": [1]})
    reply = client.rollout(prompts=[requested])
    check_group(reply.finished[0], requested)
    assert reply.end_reason == "quota"
    again = client.get_round(reply.round_id)
    assert again is not None
    check_group(again.finished[0], requested)


def test_a_stream_of_groups_and_a_summary(client: AprilClient) -> None:
    requested = [prompt(n=2, metadata=i) for i in range(3)]
    *groups, summary = client.stream(prompts=requested)
    assert isinstance(summary, RolloutSummary)
    for group, want in zip(groups, requested, strict=True):
        assert isinstance(group, RolloutGroup)
        check_group(group, want)
    assert [part["id"] for part in summary.delivered] == [want["id"] for want in requested]
    assert [group.id for group in summary.groups] == [want["id"] for want in requested]


def test_errors_carry_status_field_and_reason(client: AprilClient) -> None:
    with pytest.raises(AprilError, match=r"400 prompts\[0\]\.n: ") as caught:
        client.rollout(prompts=[prompt(n=0)])
    assert (caught.value.status, caught.value.field) == (400, "prompts[0].n")
    with pytest.raises(AprilError, match="400 quota"):
        list(client.stream(quota=-1))
    with pytest.raises(AprilError, match="404"):
        client.get_round("none")


def test_failed_push_stays_open(client: AprilClient) -> None:
    before = client.state()["policy_version"]
    with client.push():
        pass
    assert client.state()["policy_version"] == before + 1

    def failing() -> None:
        with client.push():
            raise OSError("bucket 3")

    with pytest.raises(PushLeftOpenError, match="bucket 3"):
        failing()
    assert client.push_end(9)["push_open"] is False


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, SystemExit])
def test_interrupted_push_keeps_the_exception_type_and_adds_a_note(
    client: AprilClient, stopped: type[BaseException]
) -> None:
    with pytest.raises(stopped) as caught, client.push():
        raise stopped
    assert "still open" in caught.value.__notes__[0]
    client.push_end()


def test_timeout_ends_an_asynchronous_push(url: str) -> None:
    async def time_out(client: AsyncAprilClient) -> None:
        async with asyncio.timeout(None) as limit, client.push():
            limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(60)

    async def scenario() -> None:
        async with AsyncAprilClient(url) as client:
            with pytest.raises(TimeoutError) as caught:
                await time_out(client)
            assert "still open" in caught.value.__cause__.__notes__[0]
            await client.push_end()

    asyncio.run(scenario())


def test_stop_ack_drop_and_partials(client: AprilClient, url: str) -> None:
    thread = threading.Thread(
        target=AprilClient(url).rollout, kwargs={"run": "slow", "round_id": "s", "prompts": [prompt(id="left")]}
    )
    thread.start()
    deadline = time.monotonic() + 60
    while "s" not in client.state()["http"]["rounds"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.get_round("s") is None
    assert client.stop("s")["round_id"] == "s"
    thread.join(60)
    assert not thread.is_alive()
    assert client.ack("s")["acknowledged"]
    left = {"run": "slow", "id": "left", "incarnation": 0}
    assert client.partials("slow") == {"partials": [], "groups": [left], "unstarted": []}
    assert client.partials("other")["groups"] == []
    assert client.drop("slow") == {"run": "slow", "groups": [["left", 0]], "samples": 1}
    assert client.partials()["groups"] == []
    assert client.ack_audit()["refusal"] == ""
    assert client.check() == {"policy_version": client.state()["policy_version"]}, "what the scripted engine answers"


def test_disconnected_client_leaves_the_round_open(client: AprilClient, url: str) -> None:
    async def hang_up() -> None:
        async with AsyncAprilClient(url) as leaving:
            waiting = asyncio.ensure_future(leaving.rollout(run="slow", round_id="left"))
            while (await leaving.state())["http"]["rounds"].get("left", {}).get("state") != "open":
                await asyncio.sleep(0.01)
            waiting.cancel()

    asyncio.run(asyncio.wait_for(hang_up(), 60))
    assert client.state()["http"]["rounds"]["left"]["state"] == "open"
    client.stop("left")
    deadline = time.monotonic() + 60
    while (reply := client.get_round("left")) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reply is not None
    assert reply.end_reason == "stopped"


def test_asynchronous_client_has_the_same_calls(url: str) -> None:
    async def scenario() -> None:
        async with AsyncAprilClient(url) as client:
            requested = prompt(n=2, metadata=None)
            reply = await client.rollout(prompts=[requested])
            check_group(reply.finished[0], requested)
            events = [event async for event in client.stream(prompts=[prompt(n=2, metadata=None)])]
            assert [type(event) for event in events] == [RolloutGroup, RolloutSummary]
            assert await client.get_round(reply.round_id)
            assert (await client.stop(reply.round_id))["state"] == "ended"
            assert (await client.ack(reply.round_id))["acknowledged"]
            assert (await client.drop("unknown"))["groups"] == []
            assert (await client.partials("unknown"))["groups"] == []
            assert (await client.check()).keys() == {"policy_version"}, "what the scripted engine answers"
            async with client.push():
                assert (await client.state())["http"]["hooks"]
            with pytest.raises(AprilError, match="400 quota"):
                _ = [event async for event in client.stream(quota=0)]

    asyncio.run(scenario())


def test_sglang_without_the_plugin_raises_not_patched() -> None:
    server, address = serve(FastAPI())
    try:
        with AprilClient(address) as client, pytest.raises(NotPatchedError, match=r"sglang_april\.launch_server"):
            client.rollout()
    finally:
        server.should_exit = True
