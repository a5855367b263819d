"""Interruptions between rounds, when a run has only partials (`suspend-before-interrupt`)."""

from typing import Any

import pytest

from tests.support.live import LiveServer, until
from tests.support.workload import prompt, stoppers

COUNT = 4
PARAMS: dict[str, Any] = {"temperature": 0.8}
NAMES = [f"p{i}" for i in range(COUNT)]


def carry(live: LiveServer, run: str, *, tier: str = "device") -> None:
    """A round that leaves four partials."""
    prompts = [*stoppers([6]), *(prompt(name, 24 + 2 * i, **PARAMS) for i, name in enumerate(NAMES))]
    reply = live.server.rollout(run=run, prompts=prompts, quota=1, tier=tier)
    assert [g["id"] for g in reply["finished"]] == ["stop-6"]
    assert tiers(live, run) == [tier] * COUNT


def tiers(live: LiveServer, run: str) -> list[str]:
    return [p["tier"] for p in live.server.partials(run)]


def finish(live: LiveServer, run: str, *spans: tuple[int, str]) -> dict[str, Any]:
    """Finish every partial in the next round and check its spans and tokens."""
    reply = live.server.rollout(run=run, prompts=[], quota=None)
    groups = reply["finished"]
    assert sorted(g["id"] for g in groups) == NAMES
    live.check(groups, dict.fromkeys(NAMES, PARAMS))
    for sample in (s for g in groups for s in g["samples"]):
        assert [(s["version"], s["kv"]) for s in sample["spans"]] == list(spans)
    assert reply["stats"]["resumed_kept"] == COUNT
    return dict(reply)


@pytest.mark.parametrize("flush", [False, True], ids=["unflushed", "flushed"])
def test_push_between_rounds(live: LiveServer, run: str, flush: bool) -> None:
    """Partials stay in their tier, or move to the host if the push flushes, and resume under the new version."""
    v = live.version
    carry(live, run)
    assert live.push(1, flush=flush) == v + 1
    assert tiers(live, run) == ["host" if flush else "device"] * COUNT
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


@pytest.mark.parametrize("flush", [False, True], ids=["unflushed", "flushed"])
def test_weight_call_without_begin_is_applied_at_once(live: LiveServer, run: str, flush: bool) -> None:
    """With no open round, the weights are applied at once and the version moves."""
    v = live.version
    carry(live, run)
    assert live.load(1, flush=flush)["success"]
    assert live.version == v + 1
    live.policies[v + 1] = live.model(1)
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


@pytest.mark.parametrize("query", ["", "?timeout=60"])
def test_flush_between_rounds(live: LiveServer, run: str, query: str) -> None:
    """Pages move to the host before the pools are cleared; the test server overwrites freed pages."""
    v = live.version
    carry(live, run)
    live.server.post(f"/flush_cache{query}")
    assert tiers(live, run) == ["host"] * COUNT
    assert live.server.state()["pool"]["held"] == 0
    finish(live, run, (v, "fresh"))


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_release_and_resume(live: LiveServer, run: str, paused: bool) -> None:
    """Pages move out first, admission is closed meanwhile, and tags that are not released cannot be resumed."""
    v, server = live.version, live.server
    carry(live, run)
    if paused:
        server.post("/pause_generation", {"mode": "abort"})
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]}, status=400)
    server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert tiers(live, run) == ["host"] * COUNT
    refused = server.rollout(run=run, prompts=[], status=503)
    assert "memory is released (kv_cache)" in refused["error"]["reason"]
    server.post("/resume_memory_occupation", {"tags": ["weights"]}, status=400)
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    if paused:
        server.post("/continue_generation", {"torch_empty_cache": False})
    finish(live, run, (v, "fresh"))


def test_release_after_a_batch_of_which_one_rid_is_in_use(live: LiveServer) -> None:
    """SGLang 0.5.15.post1, 0.5.16 and 0.5.18 refuse it, and keep the states of its other prompts for ever."""
    server, params = live.server, {"max_new_tokens": 200, "ignore_eos": True}
    with server.slowed():
        body = {"input_ids": [7, 8], "rid": "in-use", "sampling_params": params}
        answer = live.in_background(server.http.post, "/generate", json=body)
        live.wait_decodes(3)
        server.post("/release_memory_occupation", {"tags": ["kv_cache"]}, status=400)
        batch = {"input_ids": [[7], [8]], "rid": ["new", "in-use"], "sampling_params": params}
        server.post("/generate", batch, status=400)
        server.post("/abort_request", {"rid": "in-use"})
    live.result_of(answer)
    server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


@pytest.mark.parametrize("ids", [[7, 8], [[7, 8], [9]]], ids=["prompt", "batch"])
def test_release_after_a_stream_of_several_answers(live: LiveServer, ids: list[Any]) -> None:
    """SGLang 0.5.15.post1, 0.5.16 and 0.5.18 keep states of such a request for ever."""
    params = {"max_new_tokens": 2, "ignore_eos": True, "n": 3}
    answer = live.server.http.post("/generate", json={"input_ids": ids, "sampling_params": params, "stream": True})
    assert answer.text.endswith("[DONE]\n\n")
    live.server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    live.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})


def test_push_while_memory_is_released(live: LiveServer, run: str) -> None:
    """The colocated order: release all, resume the weights, push, resume the KV pool; no page is touched meanwhile."""
    v, server = live.version, live.server
    carry(live, run)
    server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    server.post("/resume_memory_occupation", {"tags": ["weights"]})
    assert live.push(1, flush=False) == v + 1
    assert "memory is released (kv_cache)" in server.state()["closed"]
    server.rollout(run=run, prompts=[], status=503)
    assert tiers(live, run) == ["host"] * COUNT
    server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    finish(live, run, (v, "fresh"), (v + 1, "kept"))


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(live: LiveServer, run: str, mode: str) -> None:
    """Partials stay in their tier; a round opened during the pause waits for its end."""
    v, server = live.version, live.server
    carry(live, run)
    server.post("/pause_generation", {"mode": mode})
    assert tiers(live, run) == ["device"] * COUNT
    before = len(server.forwards())
    reply = live.in_background(finish, live, run, (v, "fresh"))
    until(lambda: server.state()["rounds"], "the round is open")
    assert server.state()["samples"]["running"] == 0
    assert (len(server.forwards()), reply.done()) == (before, False)
    server.post("/continue_generation", {"torch_empty_cache": False})
    live.result_of(reply)


@pytest.mark.parametrize("body", [{"abort_all": True}, {"rid": "april"}, {"rid": "april.0.0"}])
def test_abort_spares_partials(live: LiveServer, run: str, body: dict[str, Any]) -> None:
    """No request to `/abort_request` aborts a partial."""
    v = live.version
    carry(live, run)
    before = live.server.partials(run)
    live.server.post("/abort_request", body)
    assert live.server.partials(run) == before
    finish(live, run, (v, "fresh"))


@pytest.mark.parametrize("tier", ["device", "host"])
def test_drop_deletes_partials_and_pages(live: LiveServer, run: str, tier: str) -> None:
    """Drop deletes partials together with their pages."""
    carry(live, run, tier=tier)
    assert live.server.post("/april/drop", {"run": run, "ids": ["p2"]})["samples"] == 1
    assert [p["id"] for p in live.server.partials(run)] == ["p0", "p1", "p3"]
    assert live.server.post("/april/drop", {"run": run})["samples"] == COUNT - 1
    assert live.server.partials(run) == []
    state = live.server.state()
    assert (state["pool"]["held"], state["tokens"]["host"]) == (0, 0)
    assert live.server.drain(run) == []
