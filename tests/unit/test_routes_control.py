"""Stops, pushes, clients that leave, state and drops, through the real app and service."""

import asyncio
import threading

import pytest

from sglang_april.api import messages
from sglang_april.http import bodies, routes
from tests.unit.http_app import client_of, open_round, run, until
from tests.unit.scripted_engine import prompt, service


def test_disconnect_ends_only_that_request() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            body = {"round_id": "r", "prompts": [prompt(id="a")]}
            task = await open_round(client, engine, **body)
            task.cancel()
            await asyncio.wait([task])
            engine.finish(engine.opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            await until(lambda: april.rounds.kept)
            assert (await client.get("/april/rounds/r")).json()["finished"][0]["id"] == "a"

    run(scenario())


def test_cancelled_stream_does_not_cancel_decoding_for_others() -> None:
    """The client disconnects while a text is decoded that the reply and another stream wait for."""

    async def scenario() -> None:
        april, engine = service()
        gate, decode = threading.Event(), engine.decode
        engine.decode = lambda *args: (gate.wait(10), decode(*args))[1]
        async with client_of(april) as client:
            body = {"round_id": "r", "stream": True, "previews": True, "prompts": [prompt(id="a")]}
            leaves = await open_round(client, engine, **body)
            stays = asyncio.create_task(client.post("/april/rollout", json=body))
            engine.finish(engine.opened, ("a", 0))
            await asyncio.sleep(0.05)
            leaves.cancel()
            await asyncio.wait([leaves])
            engine.end(engine.opened, ("a", [0]))
            gate.set()
            assert '"text":"ab"' in (await stays).text
            reply = (await client.get("/april/rounds/r")).json()
            assert reply["finished"][0]["samples"][0]["text"] == "ab"

    run(scenario())


def test_failed_reply_answers_with_an_error() -> None:
    """A cancelled text raises `CancelledError`, which is no `Exception`."""

    async def scenario() -> None:
        april, engine = service()
        gate = threading.Event()
        engine.decode = lambda *_: str(gate.wait(10))
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            engine.finish(engine.opened, ("a", 0))
            april.rounds.find("r").events[0].done[0].text.cancel()
            engine.end(engine.opened, ("a", [0]))
            response = await asyncio.wait_for(task, 5)
            gate.set()
            assert (response.status_code, response.json()["error"]["field"]) == (500, "server")
            assert (await client.get("/april/rounds/r")).content == response.content

    run(scenario())


def test_failed_round_end_answers_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception in the handler, not only a missing sample."""

    async def scenario() -> None:
        april, engine = service()

        def fails(*_: object) -> None:
            raise ZeroDivisionError("reason")

        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            engine.finish(engine.opened, ("a", 0))
            monkeypatch.setattr(april.completed_groups, "take", fails)
            engine.end(engine.opened, ("a", [0]))
            response = await asyncio.wait_for(task, 5)
            assert (response.status_code, response.json()["error"]["reason"]) == (500, "ZeroDivisionError: reason")

    run(scenario())


@pytest.mark.parametrize(("tokens", "on_the_loop"), [(8, True), (bodies.SMALL, False)])
def test_a_large_event_is_encoded_off_the_loop(tokens: int, on_the_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every other request would wait for it."""
    threads, encode = [], routes.encode_event
    monkeypatch.setattr(
        routes, "encode_event", lambda *a, **k: (threads.append(threading.get_ident()), encode(*a, **k))[1]
    )

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, stream=True, prompts=[prompt(id="a")])
            engine.finish(engine.opened, ("a", 0), ids="x" * tokens)
            engine.end(engine.opened, ("a", [0]))
            assert "x" * tokens in (await task).text
        assert [thread == threading.get_ident() for thread in threads] == [on_the_loop]

    run(scenario())


def test_stop_is_idempotent_and_does_not_wait_for_the_reply() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            response = await client.post("/april/rounds/r/stop", json={"deliver": ["a"]})
            assert response.json() == {"round_id": "r", "state": "open"}
            assert engine.commands[-1].deliver == ["a"]
            engine.end(engine.opened, reason="stopped")
            await task
            assert (await client.post("/april/rounds/r/stop")).json() == {"round_id": "r", "state": "ended"}
            assert (await client.post("/april/rounds/none/stop")).status_code == 404

    run(scenario())


def test_stop_before_the_round_is_open_takes_effect_later() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            await engine.lock.acquire_writer()
            task = asyncio.create_task(client.post("/april/rollout", json={"round_id": "r"}))
            await until(lambda: april.rounds.open)
            assert (await client.post("/april/rounds/r/stop")).json()["state"] == "opening"
            assert not engine.commands
            await engine.lock.release_writer()
            await until(lambda: isinstance(engine.commands[-1] if engine.commands else None, messages.StopRound))
            engine.end(engine.opened, reason="stopped")
            assert (await task).json()["end_reason"] == "stopped"

    run(scenario())


def test_a_weight_call_waits_for_the_round_unless_a_push_is_open() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, prompts=[prompt(id="a")])
            writer = asyncio.create_task(engine.lock.acquire_writer())
            await asyncio.sleep(0.01)
            assert not writer.done()
            assert (await client.post("/april/push/begin")).status_code == 200
            await asyncio.wait_for(writer, 1)
            ended = (await client.post("/april/push/end", json={"version": 3})).json()
            assert ended == {"push_open": False, "policy_version": 1}
            assert engine.commands[-1].version == 3
            assert not april.weight_lock.held
            await engine.lock.release_writer()
            await until(lambda: april.weight_lock.held)
            engine.end(engine.opened, reason="stopped")
            await task
            assert not await engine.lock.is_locked()

    run(scenario())


@pytest.mark.parametrize("requested", ["before", "in"])
@pytest.mark.parametrize("interruption", ["pause", "push"])
def test_a_round_that_opens_while_a_pause_or_push_ends_keeps_a_weight_call_waiting(
    interruption: str, requested: str
) -> None:
    """With a journal, the round's answer waits for a write and the end of the pause or push overtakes it."""

    async def scenario() -> None:
        april, engine = service()
        engine.silent = {messages.OpenRound}
        begin, end = {
            "pause": (april.pushes.freeze, april.pushes.thaw),
            "push": (lambda: april.pushes.begin(None), lambda: april.pushes.end(None)),
        }[interruption]
        async with client_of(april) as client:
            body = {"prompts": [prompt(id="a")]}
            if requested == "in":
                await begin()
                task = await open_round(client, engine, **body)
            else:
                task = await open_round(client, engine, **body)
                await begin()
            await end()
            assert not april.weight_lock.held
            engine.emit(messages.Answer(engine.opened.seq, data={"policy_version": 0}))
            await until(lambda: april.weight_lock.held)
            writer = asyncio.create_task(engine.lock.acquire_writer())
            await asyncio.sleep(0.01)
            assert not writer.done()
            engine.end(engine.opened, reason="stopped")
            await task
            await asyncio.wait_for(writer, 1)

    run(scenario())


@pytest.mark.parametrize("paused", [True, False])
def test_a_weight_call_does_not_wait_for_a_round_that_waits_for_lost_weights(paused: bool) -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, prompts=[prompt(id="a")])
            if paused:
                await april.pushes.freeze()
            state = {"released": ["weights"], "unnamed": True}
            engine.answers[messages.GetState] = messages.Answer(0, data=state)
            assert await april.released_memory() == ["weights"]
            if paused:
                await april.pushes.thaw()
            writer = asyncio.create_task(engine.lock.acquire_writer())
            await asyncio.wait_for(writer, 1)
            engine.emit(messages.Named(1))
            await engine.lock.release_writer()
            await until(lambda: april.weight_lock.held)
            engine.end(engine.opened, reason="stopped")
            await task

    run(scenario())


def test_refused_push_releases_no_reader() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            await open_round(client, engine, prompts=[prompt(id="a")])
            engine.answers[messages.PushEnd] = messages.Answer(0, 409, "push", "no push is open")
            refused = await client.post("/april/push/end")
            assert (refused.status_code, refused.json()["error"]["reason"]) == (409, "no push is open")
            assert len(april.weight_lock.held) == 1

    run(scenario())


def test_state_partials_drop_and_ack() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", keep_until_ack=True, prompts=[prompt(id="a")])
            state = (await client.get("/april/state")).json()
            assert state["http"]["rounds"] == {"r": {"run": "default", "state": "open"}}
            assert (await client.post("/april/rounds/r/ack")).status_code == 409
            engine.end(engine.opened, reason="stopped")
            await task
            assert (await client.post("/april/rounds/r/ack")).json() == {"round_id": "r", "acknowledged": True}
            assert (await client.get("/april/partials", params={"run": "x"})).status_code == 200
            assert engine.commands[-1].run == "x"
            assert len(april.completed_groups) == 1
            assert (await client.post("/april/drop", json={"run": "default", "ids": ["a"]})).status_code == 200
            assert not len(april.completed_groups)

    run(scenario())
