"""The HTTP process after a restart: the state restored from the journal, and journal faults."""

import asyncio

from sglang_april.api import messages, requests
from sglang_april.http.validation import fingerprint
from tests.unit.http_app import client_of, open_round, run, until
from tests.unit.restored_fixtures import BODY, before, kept, reported, restored, run_rounds, with_journal
from tests.unit.scripted_engine import prompt


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
