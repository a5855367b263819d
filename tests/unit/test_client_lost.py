"""The client when connections are lost: one error, repeated calls, continued streams."""

import asyncio
import contextlib
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from sglang_april.client import (
    AprilClient,
    AsyncAprilClient,
    AsyncEnginePool,
    EnginePool,
    ServerLostError,
)
from sglang_april.client.keep_alive import SOCKET_OPTIONS, with_keep_alive
from sglang_april.client.streamed_round import StreamedRound
from sglang_april.client.types import RolloutGroup, RolloutSummary
from tests.unit.eager_server import eager_server
from tests.unit.scripted_engine import prompt


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with eager_server() as address:
        yield address


class LosesEveryOther(httpx.HTTPTransport):
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
    transport = LosesEveryOther()
    with AprilClient(url, retry_s=10, transport=transport) as client:
        events = client.stream(run="slow", round_id="lossy", prompts=[prompt()])
        first = client.extend("lossy", quota_add=1)
        second = client.extend("lossy", quota_add=1)
        assert (first["round_id"], second["round_id"]) == ("lossy", "lossy")
        keys = [msgspec.msgpack.decode(body)["idempotency_key"] for body in transport.bodies]
        assert keys[0] == keys[1] != keys[2] == keys[3]
        client.stop("lossy")
        list(events)


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
        assert "The above exception" not in "".join(traceback.format_exception(caught.value))
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


def test_url_without_a_scheme_is_http(url: str) -> None:
    with AprilClient(url.removeprefix("http://")) as client:
        assert client.state()["http"]["hooks"]
    with pytest.raises(ServerLostError, match=r"^http://127\.0\.0\.1:9: "):
        AprilClient("127.0.0.1:9").state()


def test_unreachable_server_is_one_error_of_the_asynchronous_clients_too() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def calls() -> list[BaseException]:
            async with AsyncAprilClient(dead) as client:
                pool = AsyncEnginePool(EnginePool([AprilClient(dead), AprilClient(dead)]))

                async def follow(stream: Any) -> None:
                    async for _ in stream:
                        pass

                async def push(of: AsyncAprilClient | AsyncEnginePool) -> None:
                    async with of.push():
                        pass

                body = {"run": "r", "prompts": [prompt()], "quota": 1}
                attempts = [client.rollout(**body), pool.partials("r"), push(client), push(pool)]
                attempts += [follow(client.stream(**body)), follow(pool.stream(**body))]
                return await asyncio.gather(*attempts, return_exceptions=True)

        for error in asyncio.run(calls()):
            assert isinstance(error, ServerLostError)
            assert str(error).startswith(f"{dead}: no answer to ")
            assert len(traceback.format_exception(error)) < 30


def test_several_events_of_one_group_are_not_repetitions() -> None:
    """With `quota_unit: sample` each sample is an event of its own; a restarted server sends them as one group."""
    streamed = StreamedRound()

    def event(*indices: int) -> RolloutGroup:
        samples: list[Any] = [SimpleNamespace(index=index) for index in indices]
        return RolloutGroup("a", 0, None, np.array([1]), False, None, samples, delivered=False)

    new = [streamed.new(event(*indices)) for indices in ((0,), (1,), (0,), (0, 1, 2))]
    assert [isinstance(one, RolloutGroup) and [s.index for s in one.samples] for one in new] == [[0], [1], False, [2]]
    parts = [{"id": "a", "incarnation": 0, "indices": [1, 2], "complete": True, "accepted": True}]
    summary = RolloutSummary("r", "run", 3, "quota", parts, {}, {})
    assert streamed.new(summary) is summary
    assert [[sample.index for sample in group.samples] for group in summary.groups] == [[1, 2]]
    assert (summary.groups[0].accepted, summary.groups[0].complete, summary.groups[0].delivered) == (True, True, True)


def test_a_machine_that_died_is_noticed() -> None:
    """While a client waits for an answer, the system sends keep-alive probes on its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = AprilClient(f"http://127.0.0.1:{port}")
        waits = threading.Thread(target=lambda: suppressed(client.state), daemon=True)
        waits.start()
        connection, _ = server.accept()
        connection.recv(1000)
        timers = [
            line.split()[5]
            for line in Path("/proc/net/tcp").read_text().splitlines()
            if line.split()[2].endswith(f":{port:04X}")
        ]
        connection.close()
        waits.join()
    assert any(timer.startswith("02:") for timer in timers), timers  # the kernel's keep-alive timer


def suppressed(call: Callable[[], Any]) -> None:
    with contextlib.suppress(ServerLostError):
        call()


def test_options_of_the_caller_and_proxies_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx would ignore both if it were simply given a transport."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    url, given = "https://engine:30000", {"verify": False, "headers": {"a": "b"}}
    options = with_keep_alive(dict, url, given)
    assert options == {**given, "transport": {"socket_options": SOCKET_OPTIONS, "verify": False}}
    assert with_keep_alive(dict, url, {"transport": "mine"}) == {"transport": "mine"}
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert with_keep_alive(dict, url, given) == given
    assert "transport" in with_keep_alive(dict, "http://engine:30000", given)
    assert "transport" in with_keep_alive(dict, url, {"trust_env": False})
    monkeypatch.setenv("no_proxy", "engine")
    assert "transport" in with_keep_alive(dict, url, given)
