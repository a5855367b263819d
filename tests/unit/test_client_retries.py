"""How long a client repeats a call whose connection was lost, and what it takes for a lost server."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from sglang_april import PROTOCOL
from sglang_april.client import AprilClient, AsyncAprilClient, RolloutReply, ServerLostError
from sglang_april.client.calls import Calls
from sglang_april.client.retries import Retries

STATE = {"http": {"hooks": {"protocol": PROTOCOL}}}
REPLY = {"round_id": "r", "run": "a", "policy_version": 0, "end_reason": "quota", "carried": {}, "stats": {}}
Answer = httpx.Response | Exception


def answers(*of_rollout: Callable[[], Answer]) -> httpx.MockTransport:
    """A server, for both clients, that answers rounds with these, in order."""
    left = list(of_rollout)

    def handle(request: httpx.Request) -> httpx.Response:
        answer = left.pop(0)() if request.url.path == "/april/rollout" else httpx.Response(200, json=STATE)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.MockTransport(handle)


def blocking(transport: httpx.MockTransport, retry_s: float) -> RolloutReply:
    with AprilClient("http://engine", retry_s=retry_s, transport=transport) as client:
        return client.rollout(prompts=[])


def asynchronous(transport: httpx.MockTransport, retry_s: float) -> RolloutReply:
    async def call() -> RolloutReply:
        async with AsyncAprilClient("http://engine", retry_s=retry_s, transport=transport) as client:
            return await client.rollout(prompts=[])

    return asyncio.run(call())


CLIENTS = pytest.mark.parametrize("rollout", [blocking, asynchronous])


def reply() -> Answer:
    return httpx.Response(200, content=msgspec.json.encode(REPLY))


@CLIENTS
def test_a_round_that_lasted_longer_than_retry_s_is_repeated(rollout: Callable[..., RolloutReply]) -> None:
    def lost_late() -> Answer:
        time.sleep(0.1)
        return httpx.RemoteProtocolError("server disconnected")

    assert rollout(answers(lost_late, lost_late, reply), retry_s=0.05).round_id == "r"


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
