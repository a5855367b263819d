"""The routes, through the real app and service, against a scripted scheduler."""

import asyncio
import json

import httpx
import msgspec
import numpy as np
from fastapi import FastAPI

from sglang_april.api import messages
from sglang_april.http.routes import add_routes
from tests.unit.http_app import client_of, open_round, run, until
from tests.unit.scripted_engine import prompt, service, sglang_module


def test_a_round_from_request_to_reply() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            body = {"prompts": [prompt(id="a", n=2, metadata={"answer": 4}), prompt(id="b", text="hi", input_ids=None)]}
            waiting = await open_round(client, engine, **body, sampling_params={"temperature": 0.5})
            opened, spec = engine.opened, engine.opened.spec
            assert (spec.run, spec.quota, spec.quota_unit, spec.kv) == ("default", 1, "group", "auto")
            assert opened.prompts[1].input_ids == np.array([104, 105], "<i4").tobytes()
            assert len(opened.params) == 1
            engine.finish(opened, ("a", 0), whole=False)
            engine.finish(opened, ("a", 1), ids="xyz")
            engine.end(opened, ("a", [0, 1]), stats={"t_quota_met": 0.0, "warnings": []})
            reply = (await waiting).json()
        assert reply["round_id"] == opened.spec.round_id
        assert (reply["end_reason"], reply["policy_version"]) == ("quota", 0)
        (group,) = reply["finished"]
        assert group["metadata"] == {"answer": 4}
        assert (group["prompt_ids"], group["complete"], group["accepted"]) == ([1, 2, 3], True, None)
        assert [sample["text"] for sample in group["samples"]] == ["ab", "xyz"]
        assert group["samples"][1]["output_ids"] == [120, 121, 122]
        assert group["samples"][0]["logprob_kind"] == "processed"
        assert group["samples"][0]["spans"] == [{"start": 0, "end": 2, "version": 0, "kv": "fresh"}]
        assert reply["stats"]["quota_to_reply_s"] > 0
        assert reply["stats"]["delivered"]["tokens_by_kv"] == {"fresh": 5, "kept": 0, "recomputed": 0}

    run(scenario())


def test_msgpack_and_json_replies_are_equal() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            ids = np.array([5, 6], "<i4").tobytes()
            data = msgspec.msgpack.encode(
                {"round_id": "r", "prompts": [{"id": "a", "input_ids": ids, "metadata": [1]}]}
            )
            headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
            task = asyncio.create_task(client.post("/april/rollout", content=data, headers=headers))
            await until(lambda: engine.commands)
            engine.finish(engine.opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            response = await task
            assert response.headers["content-type"] == "application/msgpack"
            packed = msgspec.msgpack.decode(response.content)
            plain = (await client.get("/april/rounds/r")).json()
        group = packed["finished"][0]
        sample = group["samples"][0]
        assert group["prompt_ids"] == ids
        group["prompt_ids"] = [5, 6]
        sample["output_ids"] = np.frombuffer(sample["output_ids"], "<i4").tolist()
        sample["logprobs"] = np.frombuffer(sample["logprobs"], "<f4").tolist()
        assert packed == plain

    run(scenario())


def test_the_same_id_waits_and_replays_and_another_body_is_refused() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            body = {"round_id": "r1", "prompts": [{"id": "a", "input_ids": [1]}]}
            first = await open_round(client, engine, **body)
            second = asyncio.create_task(client.post("/april/rollout", json=body))
            await asyncio.sleep(0.01)
            other = await client.post("/april/rollout", json={**body, "quota": 2})
            assert (other.status_code, other.json()["error"]["field"]) == (409, "round_id")
            assert (await client.get("/april/rounds/r1")).status_code == 202
            engine.finish(engine.opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            third = await client.post("/april/rollout", json=body)
            replies = [(await first).content, (await second).content, third.content]
            assert replies[0] == replies[1] == replies[2]
            assert (await client.get("/april/rounds/r1")).content == replies[0]
        assert sum(isinstance(command, messages.OpenRound) for command in engine.commands) == 1

    run(scenario())


def test_one_open_round_per_run_and_several_runs() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            one = await open_round(client, engine, run="one", prompts=[prompt(id="a")])
            opened = engine.opened
            refused = await client.post("/april/rollout", json={"run": "one"})
            assert (refused.status_code, refused.json()["error"]["field"]) == (409, "run")
            two = await open_round(client, engine, run="two", prompts=[prompt(id="a")])
            engine.end(engine.opened, reason="stopped")
            assert (await two).json()["end_reason"] == "stopped"
            engine.end(opened, reason="stopped")
            assert (await one).status_code == 200

    run(scenario())


def test_a_refused_round_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            engine.answers[messages.OpenRound] = messages.Answer(0, 503, "push", "the weights are updated only in part")
            refused = await client.post("/april/rollout", json={"round_id": "r", "prompts": [prompt()]})
            assert refused.status_code == 503
            assert refused.json() == {"error": {"field": "push", "reason": "the weights are updated only in part"}}
            assert (await client.get("/april/rounds/r")).status_code == 404
            assert not april.rounds.open
            assert not len(april.completed_groups)
            assert not await engine.lock.is_locked()

    run(scenario())


def test_refused_duplicate_prompt_leaves_the_first_unchanged() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            first = await open_round(client, engine, prompts=[prompt(id="a", metadata="mine")])
            opened = engine.opened
            engine.end(opened, reason="stopped")
            await first
            again = await client.post("/april/rollout", json={"prompts": [prompt(id="a", metadata="other")]})
            assert (again.status_code, again.json()["error"]["field"]) == (409, "prompts[0].id")
            second = await open_round(client, engine)
            engine.finish(opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            assert (await second).json()["finished"][0]["metadata"] == "mine"

    run(scenario())


def test_a_stream_has_only_what_the_round_delivers() -> None:
    """What has finished beyond the quota is carried: a caller that trains on events must not receive it twice."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            body = {"round_id": "s", "stream": True, "prompts": [prompt(id="a"), prompt(id="b"), prompt(id="c")]}
            task = await open_round(client, engine, **body)
            engine.finish(engine.opened, ("b", 0), ("a", 0), ("c", 0))
            engine.end(engine.opened, ("b", [0]), ("a", [0]))
            *groups, summary = map(json.loads, (await task).text.splitlines())
            assert [(group["event"], group["delivered"], group["id"]) for group in groups] == [
                ("group", True, "b"),
                ("group", True, "a"),
            ]
            assert [group["id"] for group in summary["delivered"]] == ["b", "a"]

    run(scenario())


def test_a_stream_with_previews_and_its_replay() -> None:
    """A preview is marked as one; what the round delivers beyond them follows at its end, once."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            requested = [prompt(id="a"), prompt(id="b"), prompt(id="c")]
            body = {"round_id": "s", "stream": True, "previews": True, "prompts": requested}
            task = await open_round(client, engine, **body)
            engine.finish(engine.opened, ("b", 0))
            engine.finish(engine.opened, ("a", 0), ("c", 0))
            engine.end(engine.opened, ("b", [0]), ("a", [0]))
            lines = (await task).text.splitlines()
            events = [json.loads(line) for line in lines]
            assert [event["event"] for event in events] == ["group", "group", "group", "round"]
            assert [(event["id"], event["delivered"]) for event in events[:3]] == [(i, False) for i in "bac"]
            assert [group["id"] for group in events[3]["delivered"]] == ["b", "a"]
            assert "finished" not in events[3]
            assert (await client.post("/april/rollout", json=body)).text.splitlines() == lines
            assert april.completed_groups.samples == 1
            task = await open_round(client, engine, round_id="t", stream=True, previews=True)
            engine.end(engine.opened, ("c", [0]))
            *groups, _ = map(json.loads, (await task).text.splitlines())
            assert [(group["id"], group["delivered"]) for group in groups] == [("c", True)]

    run(scenario())


def test_unit_sample_streams_samples_and_the_rest_of_the_group_later() -> None:
    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            body = {"quota_unit": "sample", "stream": True, "previews": True, "prompts": [prompt(id="a", n=3)]}
            task = await open_round(client, engine, **body)
            opened = engine.opened
            engine.finish(opened, ("a", 1), whole=False)
            engine.finish(opened, ("a", 2), whole=False)
            engine.end(opened, ("a", [1, 2]), complete=False)
            *groups, summary = map(json.loads, (await task).text.splitlines())
            assert [(g["complete"], [s["index"] for s in g["samples"]]) for g in groups] == [(False, [1]), (False, [2])]
            assert summary["delivered"][0]["indices"] == [1, 2]
            later = await open_round(client, engine, quota_unit="sample")
            engine.finish(opened, ("a", 0))
            engine.end(engine.opened, ("a", [0]))
            assert (await later).json()["finished"][0]["samples"][0]["index"] == 0
            assert not len(april.completed_groups)

    run(scenario())


def test_keys_protect_the_routes_as_they_protect_sglangs_own() -> None:
    async def scenario() -> None:
        april, _ = service()
        auth = sglang_module("srt/utils/auth.py")
        app = FastAPI()
        app.state.april = april
        add_routes(app, admin=auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL))
        auth.add_api_key_middleware(app, api_key="user", admin_api_key="boss")
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:

            async def status(method: str, path: str, key: str) -> int:
                headers = {"authorization": f"Bearer {key}"}
                return (await client.request(method, path, headers=headers, content=b'{"version": 5}')).status_code

            for path in ("/april/push/begin", "/april/push/end"):
                assert [await status("POST", path, key) for key in ("none", "user", "boss")] == [401, 401, 200]
            assert [await status("POST", "/april/drop", key) for key in ("user", "boss")] == [401, 400]
            for method, path in (("GET", "/april/state"), ("POST", "/april/rollout"), ("POST", "/april/rounds/x/stop")):
                assert await status(method, path, "none") == 401
                assert await status(method, path, "user") != 401

    run(scenario())
