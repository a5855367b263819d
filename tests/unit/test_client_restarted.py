"""The client when a server comes back after a loss: with the round, or without its journal, which loses the round."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from sglang_april import PROTOCOL
from sglang_april.api import messages
from sglang_april.client import AprilClient, AsyncAprilClient, EnginePool, RoundLostError
from sglang_april.client.types import RolloutGroup, RolloutSummary
from sglang_april.config import AprilConfig
from sglang_april.http.routes import add_routes
from sglang_april.http.service import AprilService
from tests.unit.eager_server import serve
from tests.unit.scripted_engine import ScriptedEngine, prompt

BODY: dict[str, Any] = {"run": "r", "round_id": "r.1", "quota": 2, "count": "accepted"}


class JudgedEngine(ScriptedEngine):
    """Finishes every sample as soon as its round is open; the round ends when every group has a verdict."""

    async def send(self, payload: bytes) -> None:
        await super().send(payload)
        command = self.commands[-1]
        if isinstance(command, messages.OpenRound):
            self.finish(command, *((requested.id, 0) for requested in command.prompts))
        elif isinstance(command, messages.JudgeRound) and len(self.verdicts) == len(self.opened.prompts):
            delivered = [(requested.id, [0]) for requested in self.opened.prompts]
            self.end(self.opened, *delivered, accepted=dict(self.verdicts))


@dataclass
class RestartingServers:
    """A server at `url`; `restart` replaces it by one that knows nothing of its rounds, as without a journal."""

    app: FastAPI
    url: str = ""

    def restart(self) -> None:
        engine = JudgedEngine()
        engine.april = self.app.state.april = AprilService(engine, AprilConfig(quota=1))
        engine.april.hook_report = {"hooks": ["one"], "protocol": PROTOCOL}


@pytest.fixture
def server() -> Iterator[RestartingServers]:
    app = FastAPI()
    add_routes(app, admin=lambda endpoint: endpoint)
    running, url = serve(app)
    restarts = RestartingServers(app, url)
    restarts.restart()
    yield restarts
    running.should_exit = True


class Breaks(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A stream whose connection is lost after the first line."""

    def __init__(self, stream: Any, lost: Callable[[], None]) -> None:
        self._stream, self._lost = stream, lost

    def _line(self, received: bytes) -> bytes:
        return received[: received.index(b"\n") + 1] if b"\n" in received else b""

    def __iter__(self) -> Iterator[bytes]:
        received = b""
        for part in self._stream:
            received += part
            if line := self._line(received):
                yield line
                break
        self._lost()
        raise httpx.ReadError("connection reset")

    async def __aiter__(self) -> Any:
        received = b""
        async for part in self._stream:
            received += part
            if line := self._line(received):
                yield line
                break
        self._lost()
        raise httpx.ReadError("connection reset")

    def close(self) -> None:
        self._stream.close()

    async def aclose(self) -> None:
        await self._stream.aclose()


def breaking(kind: Any, lost: Callable[[], None]) -> Any:
    """A transport that breaks the stream of the first round."""

    def first_breaks(self: Any, request: httpx.Request, response: httpx.Response) -> httpx.Response:
        if request.url.path != "/april/rollout" or self.broken:
            return response
        self.broken = True
        return httpx.Response(response.status_code, headers=response.headers, stream=Breaks(response.stream, lost))

    class Blocking(httpx.HTTPTransport):
        broken = False

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return first_breaks(self, request, super().handle_request(request))

    class AsyncRestartingServers(httpx.AsyncHTTPTransport):
        broken = False

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return first_breaks(self, request, await super().handle_async_request(request))

    return (Blocking if kind is AprilClient else AsyncRestartingServers)()


def judged(url: str, transport: Any, prompts: list[dict[str, Any]]) -> list[str]:
    """Run a round that accepts every group; the ids in the order of their previews."""
    names = []
    with AprilClient(url, retry_s=60, transport=transport) as client:
        for event in client.stream(**BODY, prompts=prompts):
            if isinstance(event, RolloutGroup):
                names.append(event.id)
                client.judge("r.1", accept=[event.id])
    assert isinstance(event, RolloutSummary)
    assert [group.id for group in event.groups] == [requested["id"] for requested in prompts]
    return names


def judged_async(url: str, transport: Any, prompts: list[dict[str, Any]]) -> list[str]:
    async def scenario() -> list[str]:
        names = []
        async with AsyncAprilClient(url, retry_s=60, transport=transport) as client:
            async for event in client.stream(**BODY, prompts=prompts):
                if isinstance(event, RolloutGroup):
                    names.append(event.id)
                    await client.judge("r.1", accept=[event.id])
        return names

    return asyncio.run(asyncio.wait_for(scenario(), 30))


CLIENTS = pytest.mark.parametrize(("judge", "kind"), [(judged, AprilClient), (judged_async, AsyncAprilClient)])


@CLIENTS
def test_a_judged_round_continues_while_the_server_has_it(server: RestartingServers, judge: Any, kind: Any) -> None:
    prompts = [prompt(), prompt()]
    names = judge(server.url, breaking(kind, lambda: None), prompts)
    assert names == [requested["id"] for requested in prompts]


@CLIENTS
@pytest.mark.timeout(60)
def test_a_judged_round_that_the_server_has_lost_is_an_error(server: RestartingServers, judge: Any, kind: Any) -> None:
    """Repeated, it would wait for ever: its groups are not shown again to a caller that has had them."""
    with pytest.raises(RoundLostError, match=r"there is no round r\.1: .* lost") as caught:
        judge(server.url, breaking(kind, server.restart), [prompt(), prompt()])
    assert (caught.value.status, caught.value.field) == (404, "round_id")


@pytest.mark.timeout(60)
def test_a_round_of_several_engines_that_one_has_lost_is_an_error(server: RestartingServers) -> None:
    pool = EnginePool([AprilClient(server.url, retry_s=60, transport=breaking(AprilClient, server.restart))])
    events = pool.stream(**{**BODY, "quota": None}, prompts=[prompt(), prompt()])
    with pytest.raises(RoundLostError):
        list(events)


def test_a_call_about_a_lost_round_says_so(server: RestartingServers) -> None:
    with AprilClient(server.url) as client:
        for call in (client.judge, client.extend, client.stop):
            with pytest.raises(RoundLostError, match="restarted without its journal"):
                call("r.1")


def test_a_stream_can_be_read_again_by_its_round_id(server: RestartingServers) -> None:
    with AprilClient(server.url) as client, httpx.Client(base_url=server.url) as http:
        first = next(client.stream(**BODY, prompts=[prompt(id="a")]))
        assert isinstance(first, RolloutGroup)
        client.judge("r.1", accept=["a"])
        events = http.get("/april/rounds/r.1", params={"stream": "true"}).text.splitlines()
        assert ['"event":"group"' in events[0], '"event":"round"' in events[1], len(events)] == [True, True, 2]
        for query in ({"stream": "yes"}, {"strea": "true"}):
            assert http.get("/april/rounds/r.1", params=query).status_code == 400
        assert http.get("/april/rounds/r.2", params={"stream": "true"}).status_code == 404
