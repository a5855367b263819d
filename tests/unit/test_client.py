"""Both clients over real HTTP, against the real routes and a scheduler that finishes everything at once."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI

from sglang_april import PROTOCOL, __version__
from sglang_april.api import messages
from sglang_april.client import (
    AprilClient,
    AprilError,
    AsyncAprilClient,
    NotPatchedError,
    PushLeftOpenError,
    ServerLostError,
)
from sglang_april.client.types import RolloutGroup, RolloutSummary
from sglang_april.config import AprilConfig
from sglang_april.http.routes import add_routes
from sglang_april.http.service import AprilService
from tests.unit.scripted_engine import ScriptedEngine, prompt


class EagerEngine(ScriptedEngine):
    """Every sample ends as soon as its round is open, and the round with it; a round of the run `slow` stays open."""

    async def send(self, payload: bytes) -> None:
        await super().send(payload)
        command = self.commands[-1]
        if isinstance(command, messages.OpenRound) and command.spec.run != "slow":
            for requested in command.prompts:
                self.finish(command, *((requested.id, i) for i in range(requested.n)))
            self.end(command, *((requested.id, list(range(requested.n))) for requested in command.prompts))
        if isinstance(command, messages.StopRound):
            self.end(self.opened, reason="stopped")


def serve(app: FastAPI) -> tuple[uvicorn.Server, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    return server, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = FastAPI()
    engine = EagerEngine()
    engine.april = app.state.april = AprilService(engine, AprilConfig(quota=1))
    engine.april.hook_report = {"hooks": ["one"], "april": __version__, "protocol": PROTOCOL}
    add_routes(app, admin=lambda endpoint: endpoint)
    server, address = serve(app)
    yield address
    server.should_exit = True


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


def test_errors_carry_status_field_and_reason(client: AprilClient) -> None:
    with pytest.raises(AprilError, match=r"400 prompts\[0\]\.n: ") as caught:
        client.rollout(prompts=[prompt(n=0)])
    assert (caught.value.status, caught.value.field) == (400, "prompts[0].n")
    with pytest.raises(AprilError, match="400 quota"):
        list(client.stream(quota=-1))
    with pytest.raises(AprilError, match="404"):
        client.get_round("none")


class LosesAnswers(httpx.HTTPTransport):
    """Loses the first answer to every `extend`."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path.endswith("/extend"):
            self.bodies.append(request.read())
            if len(self.bodies) % 2:
                raise httpx.ReadError("the connection is lost", request=request)
        return response


def test_an_extend_whose_answer_is_lost_is_repeated_with_its_key(url: str) -> None:
    transport = LosesAnswers()
    with AprilClient(url, retry_s=10, transport=transport) as client:
        events = client.stream(run="slow", round_id="lossy", prompts=[prompt()])
        first = client.extend("lossy", quota_add=1)
        second = client.extend("lossy", quota_add=1)
        assert (first["round_id"], second["round_id"]) == ("lossy", "lossy")
        keys = [msgspec.msgpack.decode(body)["idempotency_key"] for body in transport.bodies]
        assert keys[0] == keys[1] != keys[2] == keys[3]
        client.stop("lossy")
        list(events)


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
    async def scenario() -> None:
        async with AsyncAprilClient(url) as client:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.05), client.push():
                    await asyncio.sleep(60)
            assert "still open" in caught.value.__cause__.__notes__[0]
            await client.push_end()

    asyncio.run(scenario())


def test_stop_ack_drop_and_partials(client: AprilClient, url: str) -> None:
    thread = threading.Thread(target=AprilClient(url).rollout, kwargs={"run": "slow", "round_id": "s"})
    thread.start()
    deadline = time.monotonic() + 60
    while "s" not in client.state()["http"]["rounds"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.get_round("s") is None
    assert client.stop("s")["round_id"] == "s"
    thread.join(60)
    assert not thread.is_alive()
    assert client.ack("s")["acknowledged"]
    assert client.drop("slow")["run"] == "slow"
    assert client.ack_audit()["refusal"] == ""
    assert client.partials("slow")


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
            assert await client.drop("nobody")
            assert await client.partials()
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


class LossyTransport(httpx.HTTPTransport):
    """Loses the answers to the first `losses` requests to `path`: they reach the server."""

    def __init__(self, path: str, losses: int) -> None:
        super().__init__()
        self.path, self.losses, self.requests = path, losses, list[httpx.Request]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.url.path == self.path:
            self.requests.append(request)
            if self.losses:
                self.losses -= 1
                response.close()
                raise httpx.RemoteProtocolError("server disconnected")
        return response


def test_lost_connection_is_one_error_that_names_the_round(url: str) -> None:
    transport = LossyTransport("/april/rollout", 1)
    with AprilClient(url, transport=transport) as client:
        body = {"run": "lost", "prompts": [prompt(n=2, metadata=None)]}
        with pytest.raises(ServerLostError, match=r"no answer to POST /april/rollout \(RemoteProtocolError") as caught:
            client.rollout(**body)
        round_id = msgspec.msgpack.decode(transport.requests[0].content)["round_id"]
        assert f"round_id={round_id!r}" in str(caught.value)
        assert caught.value.status == 0
        reply = client.rollout(**body, round_id=round_id)
        assert [group.id for group in reply.finished] == [body["prompts"][0]["id"]]


def test_retries_find_the_same_round(url: str) -> None:
    transport = LossyTransport("/april/rollout", 2)
    with AprilClient(url, transport=transport, retry_s=60) as client:
        reply = client.rollout(run="retried", prompts=[prompt(n=2, metadata=None)])
    assert len(transport.requests) == 3
    assert {msgspec.msgpack.decode(request.content)["round_id"] for request in transport.requests} == {reply.round_id}


def test_push_is_never_repeated(url: str) -> None:
    transport = LossyTransport("/april/push/end", 1)
    with AprilClient(url, transport=transport, retry_s=60) as client:
        version = client.state()["policy_version"]
        client.push_begin()
        with pytest.raises(ServerLostError):
            client.push_end()
        assert len(transport.requests) == 1
        assert client.state()["policy_version"] == version + 1


class BreakingStream(httpx.SyncByteStream):
    """The first line of a stream, and then a broken connection."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        received = b""
        for part in self._stream:
            received += part
            if b"\n" in received:
                yield received[: received.index(b"\n") + 1]
                raise httpx.ReadError("connection reset")

    def close(self) -> None:
        self._stream.close()


class BreakingTransport(LossyTransport):
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = httpx.HTTPTransport.handle_request(self, request)
        if request.url.path == self.path:
            self.requests.append(request)
            if self.losses:
                self.losses -= 1
                broken = BreakingStream(response.stream)
                return httpx.Response(response.status_code, headers=response.headers, stream=broken)
        return response


def test_broken_stream_is_continued_without_repeating_groups(url: str) -> None:
    prompts = [prompt(id=f"p{i}", n=2, metadata=None) for i in range(3)]
    with AprilClient(url, transport=BreakingTransport("/april/rollout", 1), retry_s=60) as client:
        *groups, summary = client.stream(run="broken", prompts=prompts)
    assert isinstance(summary, RolloutSummary)
    assert [group.id for group in groups if isinstance(group, RolloutGroup)] == ["p0", "p1", "p2"]
    with (
        AprilClient(url, transport=BreakingTransport("/april/rollout", 1)) as client,
        pytest.raises(ServerLostError, match="round_id="),
    ):
        list(client.stream(run="broken again", prompts=prompts))


def test_unreachable_server_is_one_error() -> None:
    with AprilClient("http://127.0.0.1:9") as client, pytest.raises(ServerLostError, match=r"http://127\.0\.0\.1:9"):
        client.state()

    async def asynchronous() -> None:
        async with AsyncAprilClient("http://127.0.0.1:9") as client:
            await client.rollout(prompts=[])

    with pytest.raises(ServerLostError):
        asyncio.run(asynchronous())
