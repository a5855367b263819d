"""Interruptions while a round is open: no sample is lost, and every token stays exact (`suspend-before-interrupt`)."""

from typing import Any

import httpx
import pytest

from tests.support.live import LiveServer, until
from tests.support.workload import prompt

COUNT = 4
PARAMS: dict[str, Any] = {"temperature": 0.8}
PAUSES = ["in_place", "retract", "abort"]
GENERATE = {"input_ids": [9, 8, 7]}


def open_round(live: LiveServer, run: str, **body: Any) -> Any:
    """Open a round of four samples that ends when all have finished."""
    prompts = [prompt(f"p{i}", 60 + 2 * i, **PARAMS) for i in range(COUNT)]
    body = {"run": run, "round_id": f"{run}-r", "quota": None, **body}
    reply = live.open(prompts=prompts, **body)
    until(lambda: live.running() == COUNT, "all samples run")
    return reply


def finish(live: LiveServer, reply: Any, *spans: tuple[int, str]) -> dict[str, Any]:
    """Wait for the round and check the spans and tokens of all samples."""
    done = dict(live.result_of(reply))
    assert done["end_reason"] == "exhausted"
    check(live, done["finished"], *spans)
    return done


def check(live: LiveServer, groups: list[dict[str, Any]], *spans: tuple[int, str]) -> None:
    assert sorted(g["id"] for g in groups) == [f"p{i}" for i in range(COUNT)]
    live.check(groups, {f"p{i}": PARAMS for i in range(COUNT)})
    for sample in (s for g in groups for s in g["samples"]):
        assert [(s["version"], s["kv"]) for s in sample["spans"]] == list(spans)


def assert_suspended(live: LiveServer) -> None:
    """Assert that all samples are suspended, the round is open and no forward runs."""
    samples, before = live.server.state()["samples"], len(live.server.forwards())
    assert (samples["running"], samples["suspended"], samples["finished"]) == (0, COUNT, 0)
    assert len(live.server.state()["rounds"]) == 1
    assert len(live.server.forwards()) == before


def pause(live: LiveServer, mode: str) -> None:
    live.server.post("/pause_generation", {"mode": mode})


def unpause(live: LiveServer) -> None:
    live.server.post("/continue_generation", {"torch_empty_cache": False})


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_push_during_a_round(live: LiveServer, run: str, kv: str) -> None:
    """`push/begin` suspends the round: weight calls do not wait for it, and it resumes after the push."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run, kv=kv)
        live.server.post("/april/push/begin")
        assert_suspended(live)
        assert live.load(1)["success"]
        assert_suspended(live)
        assert live.server.post("/april/push/end")["policy_version"] == v + 1
    live.policies[v + 1] = live.model(1)
    done = finish(live, reply, (v, "fresh"), (v + 1, "kept" if kv == "keep" else "recomputed"))
    assert (done["policy_version"], done["stats"]["pushes"]) == (v + 1, 1)


def test_weight_call_without_begin_waits_for_the_round(live: LiveServer, run: str) -> None:
    """The weight call waits for the reply, as in stock SGLang for `/generate`."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        call = live.in_background(live.load, 1)
        live.wait_decodes(5)
        assert not call.done()
        assert (live.version, live.running()) == (v, COUNT)
    finish(live, reply, (v, "fresh"))
    assert live.result_of(call)["success"]
    assert live.version == v + 1


@pytest.mark.parametrize("mode", PAUSES)
def test_weight_call_under_a_pause_does_not_wait(live: LiveServer, run: str, mode: str) -> None:
    """The weight call is applied at once, and the round resumes under the new version."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        pause(live, mode)
        assert live.load(1)["success"]
        assert_suspended(live)
        assert live.version == v + 1
        unpause(live)
    live.policies[v + 1] = live.model(1)
    finish(live, reply, (v, "fresh"), (v + 1, "kept"))


@pytest.mark.parametrize("query", ["", "?timeout=60"])
def test_flush_during_a_round(live: LiveServer, run: str, query: str) -> None:
    """The test server overwrites pages that the flush frees, so tokens on them would be wrong."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        live.server.post(f"/flush_cache{query}")
        until(lambda: live.running() == COUNT, "the round runs again")
    done = finish(live, reply, (v, "fresh"))
    assert done["stats"]["resumed_kept"] == COUNT


def test_flush_during_a_stock_request(live: LiveServer, run: str) -> None:
    """Without a timeout the flush is refused; with one, the round stays suspended until the flush is done."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        body = {**GENERATE, "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
        stock = live.in_background(live.server.post, "/generate", body)
        until(lambda: live.server.forwards()[-1]["rows"] == COUNT + 1, "both run")
        live.server.post("/flush_cache", status=400)
        until(lambda: live.running() == COUNT, "the round runs again")
        flush = live.in_background(live.server.post, "/flush_cache?timeout=600")
        until(lambda: live.running() == 0, "the round is suspended")
        assert not flush.done()
        live.wait_decodes(3)
        assert live.running() == 0
        assert live.server.forwards()[-1]["rows"] == 1
    assert len(live.result_of(stock)["output_ids"]) == 40
    live.result_of(flush)
    finish(live, reply, (v, "fresh"))


def test_release_during_a_round_is_refused(live: LiveServer, run: str) -> None:
    """400 with the reason; stock SGLang's scheduler would fail its idle assertion."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        refused = live.server.post("/release_memory_occupation", status=400)
        assert "a round is open" in str(refused)
        live.wait_decodes(2)
    finish(live, reply, (v, "fresh"))


def test_release_beside_a_paused_request_whose_client_has_gone(live: LiveServer) -> None:
    """400 while the scheduler has it; stock SGLang's scheduler would fail its idle assertion."""
    http, tags = live.server.http, {"tags": ["kv_cache"]}
    body = {"input_ids": [7, 8], "stream": True, "sampling_params": {"max_new_tokens": 600, "ignore_eos": True}}
    with live.server.slowed():
        with http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()  # closing it ends the connection
            next(lines)
            pause(live, "in_place")
        answers = [http.post("/release_memory_occupation", json=tags) for _ in range(5)]
        assert {answer.status_code for answer in answers} == {400}
        assert "in flight" in answers[-1].text
        assert live.server.state()["closed"] == ""
        unpause(live)
    until(lambda: http.post("/release_memory_occupation", json=tags).status_code == 200, "memory is released")
    live.server.post("/resume_memory_occupation", tags)


@pytest.mark.parametrize("mode", PAUSES)
def test_release_under_a_pause(live: LiveServer, run: str, mode: str) -> None:
    """Pages move out before the pool is unmapped; releasing twice does nothing, resuming twice gives a 400."""
    v, tags = live.version, {"tags": ["kv_cache"]}
    with live.server.slowed():
        reply = open_round(live, run)
        pause(live, mode)
        for _ in range(2):
            live.server.post("/release_memory_occupation", tags)
        assert_suspended(live)
        assert live.server.state()["tokens"]["device"] == 0
        unpause(live)
        assert_suspended(live)
        assert "memory is released" in live.server.state()["closed"]
        live.server.post("/resume_memory_occupation", tags)
        live.server.post("/resume_memory_occupation", tags, status=400)
    finish(live, reply, (v, "fresh"))


@pytest.mark.parametrize("mode", PAUSES)
def test_pause_and_continue(live: LiveServer, run: str, mode: str) -> None:
    """Every pause mode suspends the round and aborts no rollout sample; `continue_generation` resumes it."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        pause(live, mode)
        for _ in range(3):
            assert_suspended(live)
        assert live.server.state()["frozen"]
        unpause(live)
        until(lambda: live.running() == COUNT, "the round runs again")
    finish(live, reply, (v, "fresh"))


def test_pause_aborts_stock_requests_only(live: LiveServer, run: str) -> None:
    """Stock SGLang's mode `abort` aborts everything; rollout samples are exempt."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        body = {**GENERATE, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
        stock = live.in_background(live.server.post, "/generate", body)
        until(lambda: live.server.forwards()[-1]["rows"] == COUNT + 1, "both run")
        pause(live, "abort")
        assert live.result_of(stock)["meta_info"]["finish_reason"]["type"] == "abort"
        assert_suspended(live)
        unpause(live)
    finish(live, reply, (v, "fresh"))


def test_abort_all_stops_open_rounds(live: LiveServer, run: str) -> None:
    """`abort_all` stops every open round; its partials continue in the next one."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        other = live.open(run=f"{run}-other", prompts=[prompt("q", 50)], quota=1)
        live.server.post("/abort_request", {"abort_all": True})
        for ended in (live.result_of(reply), live.result_of(other)):
            assert (ended["end_reason"], ended["finished"]) == ("stopped", [])
    assert len(live.server.partials(run)) == COUNT
    check(live, live.server.drain(run), (v, "fresh"))
    assert [len(g["samples"]) for g in live.server.drain(f"{run}-other")] == [1]


@pytest.mark.parametrize("rid", ["april", "a"])
def test_abort_by_rid_prefix_spares_rollout_samples(live: LiveServer, run: str, rid: str) -> None:
    """SGLang matches rids by prefix; only the stock request is aborted."""
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        body = {**GENERATE, "rid": rid, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
        stock = live.in_background(live.server.post, "/generate", body)
        until(lambda: live.server.forwards()[-1]["rows"] == COUNT + 1, "both run")
        live.server.post("/abort_request", {"rid": rid})
        assert live.result_of(stock)["meta_info"]["finish_reason"]["type"] == "abort"
        assert live.running() == COUNT
        live.server.post("/abort_request", {"rid": "april.0.0"})
        live.wait_decodes(2)
    finish(live, reply, (v, "fresh"))


def test_round_outlives_its_clients_connection(live: LiveServer, run: str) -> None:
    """The round continues, and its reply is fetched by `round_id`."""
    v, url = live.version, f"{live.server.url}/april/rollout"
    prompts = [prompt(f"p{i}", 60 + 2 * i, **PARAMS) for i in range(COUNT)]
    with live.server.slowed():
        body = {"run": run, "round_id": f"{run}-r", "prompts": prompts, "quota": None}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=httpx.Timeout(60, read=0.5))
        until(lambda: live.running() == COUNT, "the round runs again")
        assert live.server.http.get(f"/april/rounds/{run}-r").status_code == 202
        live.wait_decodes(2)
    reply = until(lambda: fetched(live, f"{run}-r"), "the reply is there")
    check(live, reply["finished"], (v, "fresh"))
    assert live.server.post("/april/rollout", body)["finished"] == reply["finished"]


def fetched(live: LiveServer, round_id: str) -> Any:
    reply = live.server.http.get(f"/april/rounds/{round_id}")
    return reply.json() if reply.status_code == 200 else None


def test_drop_of_groups(live: LiveServer, run: str) -> None:
    """Drop deletes the named groups at once; the others are unaffected."""
    with live.server.slowed():
        reply = open_round(live, run)
        dropped = live.server.post("/april/drop", {"run": run, "ids": ["p1", "p3", "unheard-of"]})
        assert (sorted(dropped["groups"]), dropped["samples"]) == ([["p1", 0], ["p3", 0]], 2)
        assert live.running() == 2
    groups = live.result_of(reply)["finished"]
    assert [g["id"] for g in groups] == ["p0", "p2"]
    live.check(groups, {"p0": PARAMS, "p2": PARAMS})
    assert live.server.drain(run) == []


def test_drop_of_a_run(live: LiveServer, run: str) -> None:
    """The round ends; a new round of the run gives its ids new incarnations."""
    with live.server.slowed():
        reply = open_round(live, run)
        assert live.server.post("/april/drop", {"run": run})["samples"] == COUNT
        done = live.result_of(reply)
    assert (done["end_reason"], done["finished"]) == ("exhausted", [])
    (again,) = live.server.rollout(run=run, prompts=[prompt("p0", 5)], quota=1)["finished"]
    assert again["incarnation"] == 1
