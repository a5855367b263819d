"""How long a client repeats a call whose connection was lost, and what it takes for a lost server."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from sglang_april import PROTOCOL
from sglang_april.api.errors import SHUTDOWN
from sglang_april.client import AprilClient, AprilError, AsyncAprilClient, ServerLostError
from sglang_april.client.calls import Calls
from sglang_april.client.retries import Retries

STATE = {"http": {"hooks": {"protocol": PROTOCOL}}}
REPLY = {"round_id": "r", "run": "a", "policy_version": 0, "end_reason": "quota", "carried": {}, "stats": {}}

Answer = httpx.Response | Exception


def answers(*of_rollout: Callable[[], Answer]) -> httpx.MockTransport:
    """A server, for both clients, that answers rounds and the continuations of their streams with these, in order."""
    left = list(of_rollout)
    paths = ("/april/rollout", "/april/rounds/r")

    def handle(request: httpx.Request) -> httpx.Response:
        answer = left.pop(0)() if request.url.path in paths else httpx.Response(200, json=STATE)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.MockTransport(handle)


def blocking(transport: httpx.MockTransport, retry_s: float) -> str:
    with AprilClient("http://engine", retry_s=retry_s, transport=transport) as client:
        return client.rollout(prompts=[], round_id="r").round_id


def asynchronous(transport: httpx.MockTransport, retry_s: float) -> str:
    async def call() -> str:
        async with AsyncAprilClient("http://engine", retry_s=retry_s, transport=transport) as client:
            return (await client.rollout(prompts=[], round_id="r")).round_id

    return asyncio.run(call())


def blocking_stream(transport: httpx.MockTransport, retry_s: float) -> str:
    with AprilClient("http://engine", retry_s=retry_s, transport=transport) as client:
        (summary,) = client.stream(prompts=[], round_id="r")
        return summary.round_id


def asynchronous_stream(transport: httpx.MockTransport, retry_s: float) -> str:
    async def call() -> str:
        async with AsyncAprilClient("http://engine", retry_s=retry_s, transport=transport) as client:
            (summary,) = [event async for event in client.stream(prompts=[], round_id="r")]
            return summary.round_id

    return asyncio.run(call())


Rollout = Callable[[httpx.MockTransport, float], str]
CLIENTS = pytest.mark.parametrize("rollout", [blocking, asynchronous])
STREAMS = pytest.mark.parametrize("stream", [blocking_stream, asynchronous_stream])


def reply() -> Answer:
    return httpx.Response(200, json=REPLY)


def summary() -> Answer:
    return httpx.Response(200, json={"event": "round", "delivered": [], **REPLY})


def refused(status: int, field: str) -> Answer:
    return httpx.Response(status, json={"error": {"field": field, "reason": "no"}})


def error_event(status: int, field: str) -> Answer:
    return httpx.Response(200, json={"event": "error", "status": status, "error": {"field": field, "reason": "no"}})


@CLIENTS
def test_a_round_that_lasted_longer_than_retry_s_is_repeated(rollout: Rollout) -> None:
    def lost_late() -> Answer:
        time.sleep(0.1)
        return httpx.RemoteProtocolError("server disconnected")

    assert rollout(answers(lost_late, lost_late, reply), 0.05) == "r"


def test_the_time_begins_at_a_loss_and_again_after_a_long_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("sglang_april.client.retries.time", type("Clock", (), {"monotonic": lambda: now[0]}))
    lost, refused = httpx.ReadError("reset"), httpx.ConnectTimeout("timed out")
    retries = Retries(Calls("engine", None, 60.0), httpx.Request("POST", "http://engine/april/rollout"))

    def attempt(lasts: float, error: Any = lost) -> float:
        retries.sending()
        now[0] += lasts
        return retries.wait_s(error)

    assert attempt(3600) == 0.5
    assert attempt(59.75) == 0.25
    assert attempt(61) == 0.5, "the server was there again"
    assert attempt(30, refused) == 0.5
    with pytest.raises(ServerLostError):
        attempt(70, refused)


@CLIENTS
def test_a_server_that_shuts_down_is_lost(rollout: Rollout) -> None:
    shuts_down = partial(refused, 503, SHUTDOWN)
    assert rollout(answers(shuts_down, shuts_down, reply), 60) == "r"
    with pytest.raises(ServerLostError, match=r"\(no\); .*round_id='r'") as caught:
        rollout(answers(shuts_down), 0)
    assert (caught.value.status, caught.value.field) == (503, SHUTDOWN)
    with pytest.raises(AprilError, match="503 audit: no"):
        rollout(answers(partial(refused, 503, "audit")), 60)


@STREAMS
def test_a_stream_of_a_server_that_shuts_down_is_continued(stream: Rollout) -> None:
    ends, shuts_down = partial(error_event, 503, SHUTDOWN), partial(refused, 503, SHUTDOWN)
    assert stream(answers(ends, shuts_down, summary), 60) == "r"
    with pytest.raises(ServerLostError, match="round_id='r'"):
        stream(answers(ends), 0)
    with pytest.raises(AprilError, match="500 journal: no"):
        stream(answers(partial(error_event, 500, "journal")), 60)


@STREAMS
def test_a_line_of_a_stream_ends_at_a_newline_only(stream: Rollout) -> None:
    """JSON strings may contain characters at which Python splits lines, and chunks may end anywhere."""
    named = {"event": "round", "delivered": [], **REPLY, "round_id": "r\u2028\u2029\x85"}
    body = f"{json.dumps(named, ensure_ascii=False)}\n".encode()

    class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from (body[i : i + 7] for i in range(0, len(body), 7))

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for chunk in self:
                yield chunk

    assert stream(answers(lambda: httpx.Response(200, stream=Chunks())), 0.0) == named["round_id"]


@pytest.mark.parametrize("kind", [AprilClient, AsyncAprilClient])
def test_headers_cookies_and_parameters_of_the_caller_are_sent(kind: Any) -> None:
    """A proxy may ask for them in every request."""
    sent: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(200, json=STATE)

    options = {"headers": {"x-proxy": "id"}, "cookies": {"c": "1"}, "params": {"q": "2"}}
    client = kind("engine:30000", api_key="key", transport=httpx.MockTransport(handle), **options)
    state = client.state()
    if kind is AsyncAprilClient:
        asyncio.run(state)
    request = sent[-1]
    assert (request.headers["x-proxy"], request.headers["cookie"], request.url.params["q"]) == ("id", "c=1", "2")
    assert request.headers["authorization"] == "Bearer key"
