"""The journal records which replies are kept, and a restart keeps those."""

import asyncio
import threading

import httpx
import pytest

from sglang_april.api import messages
from tests.unit.http_app import client_of, run, until
from tests.unit.restored_fixtures import BODY, before, kept, reported, restored, run_rounds, with_journal
from tests.unit.scripted_engine import service


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
