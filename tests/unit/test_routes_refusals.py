"""Requests that the routes refuse, and rounds that fail."""

from collections.abc import AsyncIterator

import pytest

from sglang_april.api import messages
from tests.unit.http_app import client_of, open_round, run
from tests.unit.scripted_engine import prompt, service

REFUSALS = [
    ("POST", "/april/rollout", b"{", "body", 400),
    ("POST", "/april/rollout", b'{"run": "\xff"}', "body", 400),
    ("POST", "/april/rollout", b"[]", "body", 400),
    ("POST", "/april/drop", b"{}", "run", 400),
    ("POST", "/april/drop", b'{"run": "a", "ids": [""]}', "ids[0]", 400),
    ("POST", "/april/push/begin", b'{"version": -1}', "version", 400),
    ("POST", "/april/push/end", b'{"version": "2"}', "version", 400),
    ("POST", "/april/rounds/r/stop", b'{"deliver": "a"}', "deliver", 400),
    ("POST", "/april/rounds/r/ack", b'{"x": 1}', "x", 400),
    ("POST", "/april/rounds/r/judge", b"{}", "round_id", 404),
    ("POST", "/april/rounds/r/judge", b'{"accept": "a"}', "accept", 400),
    ("POST", "/april/rounds/r/judge", b'{"accept": ["a", "b"], "reject": ["c", "b"]}', "reject[1]", 400),
    ("POST", "/april/rounds/r/extend", b"{}", "round_id", 404),
    ("POST", "/april/rounds/r/extend", b'{"quota_add": -1}', "quota_add", 400),
    ("POST", "/april/rounds/r/extend", b'{"prompts": [{"id": "a"}]}', "prompts[0].input_ids", 400),
    ("GET", "/april/rounds/a%20b", b"", "round_id", 400),
    ("GET", "/april/rounds/r", b"", "round_id", 404),
    ("GET", "/april/state?check=2", b"", "check", 400),
    ("GET", "/april/partials?runs=1", b"", "runs", 400),
    ("GET", "/april/partials?run=", b"", "run", 400),
    ("GET", "/april/rollout", b"", "path", 404),
    ("POST", "/april/nothing", b"", "path", 404),
]


@pytest.mark.parametrize(("method", "path", "content", "field", "status"), REFUSALS)
def test_bad_input_is_named(method: str, path: str, content: bytes, field: str, status: int) -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            response = await client.request(method, path, content=content)
        assert response.status_code == status
        assert response.json()["error"]["field"] == field
        assert response.json()["error"]["reason"]
        assert set(response.json()) == {"error"}
        assert not engine.commands

    run(scenario())


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_refused_before_it_is_parsed(declared: bool) -> None:
    """On every route with a body, also in chunks without a declared size."""
    sent = 0

    async def scenario() -> None:
        nonlocal sent
        april, engine = service(max_body_mb=1)

        async def chunks() -> AsyncIterator[bytes]:
            nonlocal sent
            for _ in range(100):
                sent += 1
                yield b" " * 2**16

        posts = {path for method, path, *_ in REFUSALS if method == "POST" and path != "/april/nothing"}
        async with client_of(april) as client:
            for path in sorted(posts | {"/april/rounds/r/ack"}):
                content = b" " * (2**20 + 1) if declared else chunks()
                response = await client.post(path, content=content)
                assert ("content-length" in response.request.headers) is declared
                assert response.status_code == 413, path
                error = response.json()["error"]
                assert error["field"] == "body"
                assert "--april-max-body-mb" in error["reason"]
            response = await client.request("GET", "/april/state", content=b" " * (2**20 + 1))
            assert response.status_code == 413
            response = await client.post("/april/push/begin", content=b"{}" + b" " * (2**20 - 2))
            assert response.status_code == 200, "exactly the limit"
        assert [type(c) for c in engine.commands] == [messages.PushBegin]

    run(scenario())


def test_missing_sample_fails_the_round() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, prompts=[prompt(id="a", n=2)])
            engine.finish(engine.opened, ("a", 0))
            engine.end(engine.opened, ("a", [0, 1]))
            response = await task
            assert (response.status_code, response.json()["error"]["field"]) == (500, "server")
            assert april.completed_groups.samples == 1
            assert not april.rounds.open

    run(scenario())


def test_a_round_that_cannot_be_journalled_is_refused_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        april, engine = service()
        unwritable = messages.Answer(0, 500, "journal", "the journal cannot store it: too big")
        engine.answers[messages.OpenRound] = unwritable
        async with client_of(april) as client:
            body = {"round_id": "r", "prompts": [prompt(id="a")]}
            response = await client.post("/april/rollout", json=body)
            assert (response.status_code, response.json()["error"]["reason"]) == (500, unwritable.reason)
            dropped = engine.commands[-1]
            assert isinstance(dropped, messages.Drop)
            assert (dropped.run, dropped.ids, dropped.round_id) == ("default", ["a"], "r")
            assert not april.rounds.open
            assert not april.weight_lock.held
            del engine.answers[messages.OpenRound]
            again = await open_round(client, engine, **body)
            engine.answers[messages.ExtendRound] = unwritable
            extended = await client.post("/april/rounds/r/extend", json={"prompts": [prompt(id="b")]})
            assert (extended.status_code, extended.json()["error"]["field"]) == (500, "journal")
            dropped, stopped = engine.commands[-2:]
            assert (dropped.ids, dropped.round_id, stopped.round_id) == (["b"], "", "r")
            engine.end(engine.opened, reason="stopped")
            assert (await again).status_code == 200

    run(scenario())


@pytest.mark.parametrize("error", ["", "it cannot be written"])
def test_a_round_that_ends_before_its_journal_refuses_it_is_answered(error: str) -> None:
    async def scenario() -> None:
        april, engine = service()
        engine.silent = {messages.OpenRound}
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            opened = engine.opened
            stats = {"tokens_after_quota": 0, "warnings": []}
            carried = {"groups": 0, "samples": 0, "tokens": 0, "bytes": {"device": 0, "host": 0}}
            engine.emit(messages.RoundEnded("r", "default", 0, "exhausted", [], carried, stats, error=error))
            engine.silent = set()
            next_round = await open_round(client, engine, prompts=[prompt(id="b")])
            engine.emit(messages.Answer(opened.seq, 500, "journal", "the journal cannot store it"))
            response = await task
            assert (response.status_code, response.json()["error"]["field"]) == (500, "journal")
            engine.end(engine.opened, reason="stopped")
            assert (await next_round).status_code == 200
            assert not april.rounds.open

    run(scenario())


def test_a_reply_that_cannot_be_journalled_fails_its_round() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            engine.finish(engine.opened, ("a", 0))
            deliver = [messages.Delivery("a", 0, [0], True, None)]
            engine.emit(messages.RoundEnded("r", "default", 0, "quota", deliver, {}, {}, error="it cannot be written"))
            for response in (await task, await client.get("/april/rounds/r")):
                assert response.status_code == 500
                assert response.json()["error"] == {"field": "journal", "reason": "it cannot be written"}
            assert april.completed_groups.samples == 0

    run(scenario())
