"""SGLang's own router in front of live servers: single requests go through it, rounds and pushes past it."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sglang_april.client import attach_through_router
from tests.integration.conftest import NORMAL, Pool
from tests.support.live import LiveServer, live_server, until
from tests.support.router import sglang_router
from tests.support.workload import prompt

BODY: dict[str, Any] = {
    "input_ids": [9, 8, 7, 6],
    "sampling_params": {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True},
    "return_logprob": True,
}


@pytest.fixture
def attaching(pool: Pool, models: Any) -> Iterator[list[LiveServer]]:
    """Two servers that attach every request: the router drops the headers and parameters that would name a run."""
    servers = [pool.get(f"attaching {i}", [*NORMAL, "--april-attach=agents"], forked=True) for i in range(2)]
    model = lambda seed: models("qwen3", seed)  # noqa: E731
    with live_server(servers[0], model) as first, live_server(servers[1], model) as second:
        yield [first, second]


def test_attached_requests_and_one_engine_per_trajectory(
    request: pytest.FixtureRequest, attaching: list[LiveServer]
) -> None:
    """Also under a push to one engine, and beside rounds, which are sent past the router."""
    with sglang_router(request, [live.server for live in attaching]) as client:
        served = {key: [_engine(client, attaching, key) for _ in range(2)] for key in (f"t{i}" for i in range(8))}
        assert all(len(set(engines)) == 1 for engines in served.values())
        assert {engines[0] for engines in served.values()} == {0, 1}
        key = "t0"
        live = attaching[served[key][0]]
        with live.server.slowed(0.05):
            before = live.decodes()
            answer = live.in_background(_generate, client, key)
            until(lambda: answer.done() or live.decodes() > before + 3, "the request decodes")
            live.server.post("/pause_generation", {"mode": "abort"})
            assert live.load(1)["success"]
            live.server.post("/continue_generation", {})
        spans = live.result_of(answer)["meta_info"]["april"]["spans"]
        assert [(span["version"], span["kv"]) for span in spans] == [(0, "fresh"), (1, "kept")]
        rounds_beside_attached_requests(client, attaching, served)


def rounds_beside_attached_requests(
    client: httpx.Client, servers: list[LiveServer], served: dict[str, list[int]]
) -> None:
    """Rounds are sent to the engines directly. Meanwhile the router sends each trajectory to its engine as before: the
    engines are at two policy versions here, and an answer names that of its engine."""
    assert servers[0].version != servers[1].version
    prompts = [prompt(f"p{i}", 80) for i in range(4)]
    with servers[0].server.slowed(0.05), servers[1].server.slowed(0.05):
        replies = [live.open(run="rounds", prompts=prompts, quota=None) for live in servers]
        for key, engines in served.items():
            (span,) = _generate(client, key, max_new_tokens=4)["meta_info"]["april"]["spans"]
            assert span["version"] == servers[engines[0]].version
        assert not any(reply.done() for reply in replies)
    for live, reply in zip(servers, replies, strict=True):
        assert [len(group["samples"]) for group in live.result_of(reply)["finished"]] == [1] * 4


def test_plain_requests_pass_and_rounds_do_not(
    request: pytest.FixtureRequest, normal: LiveServer, second: LiveServer
) -> None:
    """Round-robin over two engines: both answer as they do without the router, streams as well."""
    engines = [normal, second]
    with sglang_router(request, [live.server for live in engines], "round_robin") as client:
        before = [len(live.server.forwards()) for live in engines]
        answers = [_generate(client, "") for _ in range(4)]
        assert all(len(live.server.forwards()) > count for live, count in zip(engines, before, strict=True))
        direct = normal.server.post("/generate", BODY)
        for answer in answers:
            assert answer["output_ids"] == direct["output_ids"]
            assert "april" not in answer["meta_info"]
        with client.stream("POST", "/generate", json={**BODY, "stream": True}) as stream:
            chunks = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert chunks[-1]["text"] == direct["text"]
        fields = {"model": "m", "messages": [{"role": "user", "content": "1 2"}], "max_tokens": 4}
        assert client.post("/v1/chat/completions", json=fields).json()["choices"]
        assert client.post("/april/rollout", json={}).status_code == 404


def test_trajectories_through_the_router(
    request: pytest.FixtureRequest, normal: LiveServer, second: LiveServer
) -> None:
    """All legs of a trajectory reach one engine, which joins them to one record and prefills only what is new."""
    engines = [normal, second]
    with sglang_router(request, [live.server for live in engines]) as client:
        for name in (uuid.uuid4().hex for _ in range(6)):
            headers = attach_through_router("routed", name)
            first = client.post("/generate", json=BODY, headers=headers).json()
            following = BODY["input_ids"] + first["output_ids"] + [5, 5, 5]
            leg = client.post("/generate", json={**BODY, "input_ids": following}, headers=headers).json()
            assert leg["meta_info"]["april"]["trajectory"] == name
            assert leg["meta_info"]["cached_tokens"] == len(BODY["input_ids"] + first["output_ids"]) - 1
            path = f"/april/trajectories/{name}?run=routed"
            (record,) = [r.json() for r in (live.server.http.get(path) for live in engines) if r.status_code == 200]
            (branch,) = record["branches"]
            assert branch["ids"] == following + leg["output_ids"]


def test_headers_and_parameters_that_name_a_run_are_dropped(request: pytest.FixtureRequest, normal: LiveServer) -> None:
    """So behind the router only `--april-attach` attaches requests; past it, the same request is attached."""
    params = {"temperature": 0, "max_new_tokens": 4, "custom_params": {"x-april-run": "agents"}}
    body = {"input_ids": [9, 8, 7, 6], "sampling_params": params}
    with sglang_router(request, [normal.server]) as client:
        for http, attached in ((client, False), (normal.server.http, True)):
            for sent in (body, {**body, "sampling_params": {"max_new_tokens": 4}}):
                meta = http.post("/generate", json=sent, headers={"x-april-run": "agents"}).json()["meta_info"]
                assert ("april" in meta) == attached


def _generate(client: httpx.Client, key: str, **params: Any) -> Any:
    body = {**BODY, "sampling_params": {**BODY["sampling_params"], **params}}
    answer = client.post("/generate", json=body, headers={"x-smg-routing-key": key} if key else {})
    assert answer.status_code == 200, answer.text
    return answer.json()


def _engine(client: httpx.Client, servers: list[LiveServer], key: str) -> int:
    """Which server has answered; the answer names the run."""
    before = [len(live.server.forwards()) for live in servers]
    assert _generate(client, key)["meta_info"]["april"]["run"] == "agents"
    (engine,) = [i for i, live in enumerate(servers) if len(live.server.forwards()) > before[i]]
    return engine
