"""The HTTP process after a restart: the state restored from the journal, and journal faults."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from sglang_april.api import messages, requests
from sglang_april.http.service import AprilService
from sglang_april.http.validation import fingerprint
from tests.unit.http_app import client_of, open_round, run, until
from tests.unit.scripted_engine import ScriptedEngine, prompt, service

BODY: dict[str, Any] = {"run": "r", "round_id": "open", "prompts": [prompt(id="late", text="x", input_ids=None)]}


async def run_rounds(
    april: AprilService, engine: ScriptedEngine, *rounds: str, **body: Any
) -> dict[str, tuple[Any, bytes]]:
    """Run rounds of one group each; returns the command and the reply of each."""
    lived = {}
    async with client_of(april) as client:
        for name in rounds:
            requested = {
                "run": "r",
                "round_id": name,
                "prompts": [prompt(id=f"p-{name}", text="hello", input_ids=None)],
            }
            task = await open_round(client, engine, **requested, **body)
            opened = engine.opened
            engine.finish(opened, (f"p-{name}", 0))
            engine.end(opened, (f"p-{name}", [0]))
            lived[name] = opened, (await task).content
    return lived


def kept(engine: ScriptedEngine, opened: messages.OpenRound) -> messages.KeptReply:
    """A reply as the journal has it."""
    name = opened.prompts[0].id
    ended = messages.RoundEnded(
        opened.spec.round_id, opened.spec.run, 0, "quota", [messages.Delivery(name, 0, [0], True)], {}, {}
    )
    ended.carried = {"groups": 0, "samples": 0, "tokens": 0, "bytes": {"device": 0, "host": 0}}
    ended.stats = {"tokens_after_quota": 0, "warnings": []}
    return messages.KeptReply(opened.spec, ended, opened.prompts, [engine.sample(opened, name, 0, "ab", True)])


def restored(**fields: Any) -> messages.Restored:
    empty: dict[str, Any] = {
        "groups": [],
        "unjudged": [],
        "finished": [],
        "rounds": [],
        "replies": [],
        "gone": [],
        "warnings": [],
    }
    return messages.Restored(**{**empty, "unnamed": False, **fields})


def with_journal(**settings: Any) -> tuple[AprilService, ScriptedEngine]:
    return service(journal="/journal", **settings)


def reported() -> tuple[AprilService, ScriptedEngine]:
    april, engine = with_journal()
    engine.emit(restored())
    return april, engine


async def before(*names: str) -> tuple[dict[str, tuple[Any, bytes]], messages.OpenRound]:
    """The replies of a first server, and the round that was open when it died."""
    april, engine = reported()
    lived = await run_rounds(april, engine, *names)
    async with client_of(april) as client:
        task = await open_round(client, engine, **BODY)
        task.cancel()
    return lived, engine.opened


def test_requests_wait_for_the_restored_state() -> None:
    async def scenario() -> None:
        lived, _ = await before("one")
        april, engine = with_journal()
        async with client_of(april) as client:
            requested = asyncio.create_task(client.get("/april/rounds/one"))
            await asyncio.sleep(0.05)
            assert not requested.done()
            engine.emit(restored(replies=[kept(engine, lived["one"][0])], gone=["zero"]))
            assert (await requested).content == lived["one"][1]
            assert (await client.get("/april/rounds/zero")).status_code == 410
            assert (await client.get("/april/rounds/never")).status_code == 404

    run(scenario())


def test_a_round_that_was_open_is_open_again_for_the_same_body() -> None:
    async def scenario() -> None:
        _, opened = await before()
        april, engine = with_journal()
        engine.emit(restored(groups=[("r", opened.prompts[0])], rounds=[opened.spec]))
        async with client_of(april) as client:
            assert (await client.get("/april/rounds/open")).status_code == 202
            other = await client.post("/april/rollout", json={**BODY, "quota": 7})
            assert (other.status_code, other.json()["error"]["field"]) == (409, "round_id")
            again = asyncio.create_task(client.post("/april/rollout", json=BODY))
            await until(lambda: april.weight_lock.held == {"open"})
            engine.finish(opened, ("late", 0))
            engine.end(opened, ("late", [0]))
            reply = (await again).json()
            assert [g["id"] for g in reply["finished"]] == ["late"]
            assert reply["finished"][0]["samples"][0]["text"] == "ab"
            assert not any(isinstance(c, messages.OpenRound) for c in engine.commands), "it was accepted before"

    run(scenario())


def test_an_extend_from_before_the_restart_gets_its_first_answer() -> None:
    """Of a round that is open again, and of a kept reply; another body is refused."""

    async def scenario() -> None:
        lived, opened = await before("one")
        answer = {"quota": 3, "counted": 1, "incarnations": []}
        body = requests.ExtendBody(quota_add=2, idempotency_key="k")
        for spec in (opened.spec, lived["one"][0].spec):
            spec.extensions["k"] = messages.Extension(fingerprint(body), answer)
        april, engine = with_journal()
        replies = [kept(engine, lived["one"][0])]
        engine.emit(restored(groups=[("r", opened.prompts[0])], rounds=[opened.spec], replies=replies))
        async with client_of(april) as client:
            for name in ("open", "one"):
                path = f"/april/rounds/{name}/extend"
                again = await client.post(path, json={"quota_add": 2, "idempotency_key": "k"})
                assert again.json() == {"round_id": name, **answer}
                other = await client.post(path, json={"quota_add": 3, "idempotency_key": "k"})
                assert other.status_code == 409
        assert not engine.commands

    run(scenario())


def test_a_verdict_again_after_end_and_restart_gets_the_same_answer() -> None:
    """The ended round's verdicts are journalled with its reply: repeated, contradicted, and too late."""

    async def scenario() -> None:
        lived, _ = await before("one")
        opened = lived["one"][0]
        opened.spec.count = "accepted"
        april, engine = with_journal()
        reply = kept(engine, opened)
        reply.ended.verdicts = {"p-one": True, "surplus": True, "carried": False}
        engine.emit(restored(replies=[reply]))
        engine.answers[messages.JudgeRound] = messages.Answer(0, 409, "round_id", "round one has ended")
        async with client_of(april) as client:
            again = await client.post("/april/rounds/one/judge", json={"accept": ["p-one", "surplus"]})
            counts = {"round_id": "one", "accepted": 2, "rejected": 1}
            assert (again.status_code, again.json()) == (200, {**counts, "late": []})
            late = await client.post("/april/rounds/one/judge", json={"accept": ["p-one", "other"]})
            assert late.json() == {**counts, "late": ["other"]}
            for other in ({"reject": ["surplus"]}, {"accept": ["carried"]}):
                assert (await client.post("/april/rounds/one/judge", json=other)).status_code == 409

    run(scenario())


def test_a_reopened_round_that_ends_at_once_does_not_push_out_newer_replies() -> None:
    """Its reply is the newest of its run, although its text is decoded before theirs."""

    async def scenario() -> None:
        lived, opened = await before("one", "two")
        april, engine = with_journal(replies=2)
        replies = [kept(engine, lived[name][0]) for name in ("one", "two")]
        late = engine.sample(opened, "late", 0, "now", True)
        gate, decode = threading.Event(), engine.decode
        engine.decode = lambda ids, *args: (gate.wait(10) if len(ids) == 2 else None, decode(ids, *args))[1]
        engine.emit(restored(groups=[("r", opened.prompts[0])], rounds=[opened.spec], replies=replies, finished=[late]))
        engine.end(opened, ("late", [0]))
        await april.rounds.find("open").events[0].done[0].text
        await asyncio.sleep(0.05)
        gate.set()
        async with client_of(april) as client:
            found = {name: (await client.get(f"/april/rounds/{name}")).status_code for name in ("one", "two")}
            reply = await client.post("/april/rollout", json=BODY)
            assert reply.status_code == 200, reply.text
            assert found["two"] == 200
            assert (await client.get("/april/rounds/one")).status_code == 410
            assert (await client.get("/april/rounds/open")).content == reply.content

    run(scenario())


def test_restored_finished_samples_are_streamed_again() -> None:
    async def scenario() -> None:
        _, opened = await before()
        april, engine = with_journal()
        late = engine.sample(opened, "late", 0, "ab", True)
        engine.emit(restored(groups=[("r", opened.prompts[0])], rounds=[opened.spec], finished=[late]))
        (part,) = april.rounds.find("open").events
        assert (part.prompt.id, [d.sample.index for d in part.done]) == ("late", [0])

    run(scenario())


def test_no_reader_is_held_until_the_version_is_named() -> None:
    """A weight call that names it must not wait for a round that waits for the name."""

    async def scenario() -> None:
        _, opened = await before()
        april, engine = with_journal()
        engine.emit(restored(groups=[("r", opened.prompts[0])], rounds=[opened.spec], unnamed=True))
        await april.restored_state.ready()
        await asyncio.sleep(0.01)
        assert not await engine.lock.is_locked()
        await april.pushes.begin(None)
        engine.emit(messages.Named(1))
        await asyncio.sleep(0.01)
        assert not await engine.lock.is_locked(), "a push is open"
        await april.pushes.end(None)
        await until(lambda: april.weight_lock.held == {"open"})

    run(scenario())


def test_journal_fault_refuses_new_rounds_and_keeps_open_ones() -> None:
    async def scenario() -> None:
        april, engine = reported()
        lived = await run_rounds(april, engine, "one")
        async with client_of(april) as client:
            waiting = await open_round(client, engine, run="other", round_id="two", prompts=[prompt(id="x")])
            engine.emit(messages.JournalFault("the journal cannot be written: disk full"))
            refused = await client.post("/april/rollout", json={"run": "r", "prompts": [prompt(id="y")]})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (
                503,
                "the journal cannot be written: disk full",
            )
            assert (await client.get("/april/rounds/one")).content == lived["one"][1]
            assert (await client.get("/april/state")).json()["http"]["journal"]["fault"]
            engine.finish(engine.opened, ("x", 0))
            engine.end(engine.opened, ("x", [0]))
            assert (await waiting).status_code == 200
            engine.emit(messages.JournalFault(""))
            task = await open_round(client, engine, run="r", prompts=[prompt(id="y")])
            assert not task.done()
            task.cancel()

    run(scenario())


@pytest.mark.parametrize("journal", [None, "/journal"])
def test_ack_is_written_to_the_journal(journal: str | None) -> None:
    async def scenario() -> None:
        april, engine = service(journal=journal)
        if journal:
            engine.emit(restored())
        await run_rounds(april, engine, "one", keep_until_ack=True)
        assert engine.opened.spec.keep_until_ack
        async with client_of(april) as client:
            reply: httpx.Response = await client.post("/april/rounds/one/ack")
            assert reply.json() == {"round_id": "one", "acknowledged": True}
        reported = [c for c in engine.commands if isinstance(c, messages.Acknowledge)]
        assert [c.round_id for c in reported] == (["one"] if journal else [])

    run(scenario())


def test_an_acknowledged_reply_is_no_longer_protected_after_a_restart() -> None:
    """A second ack, which no trainer sends, would be needed; until then its memory would count against new rounds."""

    async def scenario() -> None:
        april, engine = reported()
        lived = await run_rounds(april, engine, "one", keep_until_ack=True)
        replies = [kept(engine, lived["one"][0])]
        for acknowledged in (False, True):
            replies[0].acknowledged = acknowledged
            april, engine = with_journal()
            engine.emit(restored(replies=replies))
            await april.restored_state.ready()
            assert april.rounds.find("one").protected is not acknowledged

    run(scenario())


def test_the_journal_deletes_the_replies_that_this_process_does_not_keep() -> None:
    async def scenario() -> None:
        april, engine = with_journal(replies=1)
        lived = await before("one", "two")
        engine.emit(restored(replies=[kept(engine, lived[0][name][0]) for name in ("one", "two")]))
        await april.restored_state.ready()
        await until(lambda: engine.commands)
        await run_rounds(april, engine, "three")
        await until(lambda: len(engine.commands) == 3)
        deleted = [c.round_id for c in engine.commands if isinstance(c, messages.DeleteReply)]
        assert deleted == ["one", "two"]

    run(scenario())


def test_damage_is_reported_in_the_state() -> None:
    async def scenario() -> None:
        april, engine = with_journal()
        engine.emit(restored(warnings=["2 journal records were damaged"]))
        async with client_of(april) as client:
            state = (await client.get("/april/state")).json()
        assert state["http"]["journal"] == {
            "path": "/journal",
            "fault": "",
            "warnings": ["2 journal records were damaged"],
        }

    run(scenario())
