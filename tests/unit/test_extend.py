"""`extend`, on the fake engine and through the routes."""

import asyncio

import msgspec

from sglang_april.api import messages
from tests.unit.controller_harness import Build, ControllerHarness, ids, lengths
from tests.unit.http_app import client_of, open_round, run, until
from tests.unit.scripted_engine import prompt, service

# --- in the scheduler


def test_extend_raises_the_quota_and_brings_prompts(harness: Build) -> None:
    """The round that would have ended continues, in the same batch."""
    w = harness()
    w.open("run", lengths(4, 30), quota=1)
    w.step(2)
    assert w.extend("run", 1, {"q": (3, 1, -8)}) == 200
    assert (ids(w.reply()), w.replies[-1].end_reason) == (["p0", "q"], "quota")


def test_extend_is_refused_for_a_prompt_in_use_a_round_without_quota_and_after_the_end(harness: Build) -> None:
    """409, and nothing changes."""
    w = harness()
    w.open("run", lengths(30), quota=None)
    assert w.extend("run", 1, {}) == 409
    assert w.extend("run", 0, lengths(1)) == 409
    w.stop("run")
    assert w.extend("run", 0, {}) == 409
    fields = {"round_id": w.replies[-1].round_id, "quota_add": 0, "prompts": [], "params": []}
    assert w.command(messages.ExtendRound, **fields).reason.endswith("has ended")


def test_a_quota_has_an_upper_end() -> None:
    """1 … 2³¹−1."""
    w = ControllerHarness()
    w.open("run", lengths(30), quota=2**31 - 2)
    assert w.extend("run", 1, {}) == 200
    fields = {"round_id": w.rounds["run"].spec.round_id, "quota_add": 1, "prompts": [], "params": []}
    assert w.command(messages.ExtendRound, **fields).status == 400


# --- through the routes


def test_extend_has_the_defaults_of_its_round() -> None:
    """The round's sampling parameters and seed, and ids whose samples may arrive from then on."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            defaults = {"temperature": 0.5, "sampling_seed": 9}
            task = await open_round(client, engine, round_id="r", sampling_params=defaults, prompts=[prompt(id="a")])
            body = {"quota_add": 2, "prompts": [prompt(id="b"), prompt(id="c", sampling_params={"top_k": 3})]}
            assert (await client.post("/april/rounds/r/extend", json=body)).status_code == 200
            extended = engine.commands[-1]
            assert (extended.quota_add, [p.seed for p in extended.prompts]) == (2, [9, 9])
            assert extended.params[extended.prompts[0].params] == engine.opened.params[0]
            engine.finish(engine.opened, ("b", 0))
            engine.end(engine.opened, ("b", [0]))
            assert [g["id"] for g in (await task).json()["finished"]] == ["b"]

    run(scenario())


def test_an_extend_with_a_known_key_changes_nothing_and_gets_the_first_answer() -> None:
    """While the first is under way, after it, in msgpack too, and after the end of the round."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            body = {"quota_add": 1, "prompts": [prompt(id="b")], "idempotency_key": "k"}
            engine.silent = {messages.ExtendRound}
            both = [asyncio.create_task(client.post("/april/rounds/r/extend", json=body)) for _ in range(2)]
            await until(lambda: isinstance(engine.commands[-1], messages.ExtendRound))
            command = engine.commands[-1]
            assert command.idempotency_key == "k"
            data = {"quota": 2, "counted": 0, "incarnations": [0]}
            engine.emit(messages.Answer(command.seq, data=data))
            first, second = [(await response).json() for response in both]
            assert first == second == {"round_id": "r", **data}
            engine.end(engine.opened, reason="stopped")
            await task
            headers = {"content-type": "application/msgpack"}
            packed = await client.post("/april/rounds/r/extend", content=msgspec.msgpack.encode(body), headers=headers)
            assert packed.json() == first
            other = await client.post("/april/rounds/r/extend", json={**body, "quota_add": 2})
            assert (other.status_code, other.json()["error"]["field"]) == (409, "idempotency_key")
            assert sum(isinstance(c, messages.ExtendRound) for c in engine.commands) == 1

    run(scenario())


def test_the_key_of_a_refused_extend_is_free_again() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            task = await open_round(client, engine, round_id="r", prompts=[prompt(id="a")])
            body = {"quota_add": 1, "idempotency_key": "k"}
            engine.answers[messages.ExtendRound] = messages.Answer(0, 409, "quota_add", "there is no quota")
            assert (await client.post("/april/rounds/r/extend", json=body)).status_code == 409
            engine.answers.clear()
            assert (await client.post("/april/rounds/r/extend", json={**body, "quota_add": 2})).status_code == 200
            engine.end(engine.opened, reason="stopped")
            await task

    run(scenario())


def test_an_extend_waits_for_its_round_to_open() -> None:
    async def scenario() -> None:
        april, engine = service()
        engine.silent = {messages.OpenRound}
        async with client_of(april) as client:
            task = asyncio.create_task(client.post("/april/rollout", json={"round_id": "r", "prompts": [prompt()]}))
            await until(lambda: engine.commands)
            extending = asyncio.create_task(client.post("/april/rounds/r/extend", json={"quota_add": 1}))
            await asyncio.sleep(0.01)
            assert len(engine.commands) == 1
            engine.emit(messages.Answer(engine.opened.seq, data={"policy_version": 0}))
            assert (await extending).status_code == 200
            engine.end(engine.opened, reason="stopped")
            await task

    run(scenario())
