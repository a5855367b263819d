"""Requests of SGLang's own routes that belong to a run survive every interruption (`attached-request`)."""

import itertools
import json
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from tests.integration.test_interruptions import PAUSES, pause, unpause
from tests.support.live import LiveServer, until

IDS = [9, 8, 7, 6, 5]
LENGTH = 60
PARAMS: dict[str, Any] = {"temperature": 0.8, "sampling_seed": 41, "max_new_tokens": LENGTH, "ignore_eos": True}
HEADERS = {"x-april-run": "agents"}
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def own_trajectory() -> None:
    """Every test has a trajectory of its own: those of earlier tests have been dropped, and get no requests."""
    HEADERS["x-april-trajectory"] = f"t{next(_numbers)}"


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "sampling_params": PARAMS, "return_logprob": True, **fields}


def generate(live: LiveServer, headers: dict[str, str] = HEADERS, **fields: Any) -> Any:
    answer = live.server.http.post("/generate", json=body(**fields), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def begin(live: LiveServer, **fields: Any) -> "Future[Any]":
    """Send an attached request, and return once it decodes."""
    before = live.decodes()
    answer = live.in_background(generate, live, **fields)
    until(lambda: answer.done() or live.decodes() > before + 3, "the request decodes")
    assert not answer.done(), answer.result()
    return answer


def check(live: LiveServer, answer: dict[str, Any], *spans: tuple[int, str], length: int = LENGTH) -> None:
    """Assert its spans, and that its tokens and logprobs are those of a replay."""
    meta = answer["meta_info"]
    april = meta["april"]
    assert (april["run"], april["trajectory"]) == ("agents", HEADERS["x-april-trajectory"])
    assert [(s["version"], s["kv"]) for s in april["spans"]] == list(spans)
    assert april["staleness"] == april["policy_version"] - spans[0][0]
    assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == length
    check_tokens(live, answer, IDS)


def check_tokens(live: LiveServer, answer: dict[str, Any], prompt_ids: list[int]) -> None:
    """Assert that tokens and logprobs are those of a replay of its spans."""
    sample = {
        "index": 0,
        "output_ids": answer["output_ids"],
        "logprobs": [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]],
        "spans": answer["meta_info"]["april"]["spans"],
        "seed": PARAMS["sampling_seed"],
    }
    live.check([{"id": "attached", "prompt_ids": prompt_ids, "samples": [sample]}], {"attached": {"temperature": 0.8}})


def assert_suspended(live: LiveServer, count: int = 1) -> None:
    samples, before = live.server.state()["samples"], len(live.server.forwards())
    assert (samples["running"], samples["suspended"]) == (0, count)
    assert len(live.server.forwards()) == before


def test_undisturbed_request(live: LiveServer) -> None:
    answer = generate(live)
    check(live, answer, (live.version, "fresh"))
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": len(answer["output_ids"])}
    assert live.server.state()["attached"] == {}


def test_other_requests_have_no_spans(live: LiveServer) -> None:
    assert "april" not in generate(live, headers={})["meta_info"]


@pytest.mark.parametrize("mode", PAUSES)
@pytest.mark.parametrize("flush", [False, True])
def test_pause_with_weights(live: LiveServer, mode: str, flush: bool) -> None:
    """A trainer pauses, loads weights and continues: the request keeps its KV and its caller waits longer."""
    v = live.version
    with live.server.slowed():
        answer = begin(live)
        pause(live, mode)
        assert_suspended(live)
        assert live.load(1, flush=flush)["success"]
        unpause(live)
    live.policies[v + 1] = live.model(1)
    check(live, live.result_of(answer), (v, "fresh"), (v + 1, "kept"))


def test_push(live: LiveServer) -> None:
    v = live.version
    with live.server.slowed():
        answer = begin(live)
        live.server.post("/april/push/begin")
        assert_suspended(live)
        late = live.in_background(generate, live)
        until(lambda: live.server.state()["attached"]["agents"]["samples"] == 2, "another request arrives")
        before = len(live.server.forwards())
        assert live.load(1)["success"]
        assert live.server.state()["samples"]["running"] == 0
        assert len(live.server.forwards()) == before
        live.server.post("/april/push/end")
    live.policies[v + 1] = live.model(1)
    check(live, live.result_of(answer), (v, "fresh"), (v + 1, "kept"))
    check(live, live.result_of(late), (v + 1, "fresh"))


@pytest.mark.parametrize(("kv", "provenance"), [("keep", "kept"), ("recompute", "recomputed")])
def test_the_kv_policy_is_that_of_its_run(live: LiveServer, run: str, kv: str, provenance: str) -> None:
    """The latest round of the run decides, although it has ended."""
    prompt = {"id": "p", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}
    live.server.rollout(run=run, prompts=[prompt], kv=kv)
    v = live.version
    with live.server.slowed():
        answer = begin(live, headers={**HEADERS, "x-april-run": run})
        live.push(1)
    result = live.result_of(answer)
    found = [(s["version"], s["kv"]) for s in result["meta_info"]["april"]["spans"]]
    assert found == [(v, "fresh"), (v + 1, provenance)]
    check_tokens(live, result, IDS)


def test_weight_call_does_not_wait_for_it(live: LiveServer) -> None:
    v = live.version
    with live.server.slowed():
        answer = begin(live)
        assert live.load(1)["success"]
        assert not answer.done()
    live.policies[v + 1] = live.model(1)
    check(live, live.result_of(answer), (v, "fresh"), (v + 1, "kept"))


def test_flush_and_release(live: LiveServer) -> None:
    v = live.version
    with live.server.slowed():
        answer = begin(live)
        assert live.server.http.post("/flush_cache").status_code == 200
        live.wait_decodes()
        assert not answer.done()
        live.server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        assert_suspended(live)
        live.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    check(live, live.result_of(answer), (v, "fresh"))


def test_stream_has_every_chunk_once(live: LiveServer) -> None:
    whole = generate(live)
    chunks: list[dict[str, Any]] = []

    def read() -> None:
        with live.server.http.stream("POST", "/generate", json=body(stream=True), headers=HEADERS) as answer:
            chunks.extend(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))

    with live.server.slowed():
        reader = live.in_background(read)
        for mode in PAUSES:
            count = len(chunks)
            until(lambda: len(chunks) > count + 5, "the stream continues")  # noqa: B023
            pause(live, mode)
            assert_suspended(live)
            unpause(live)
    live.result_of(reader)
    assert all(len(a["output_ids"]) < len(b["output_ids"]) for a, b in itertools.pairwise(chunks)), "none comes twice"
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert [s["kv"] for s in chunks[-1]["meta_info"]["april"]["spans"]] == ["fresh"]


@pytest.mark.parametrize("suspended", [False, True])
@pytest.mark.parametrize("by", ["rid", "all"])
def test_abort_returns_the_tokens_so_far(live: LiveServer, suspended: bool, by: str) -> None:
    with live.server.slowed():
        answer = begin(live, rid="leg-1")
        other = begin(live, rid="leg-12")
        if suspended:
            pause(live, "in_place")
            assert_suspended(live, 2)
        live.server.post("/abort_request", {"rid": "leg-1"} if by == "rid" else {"abort_all": True})
        if suspended and by == "all":
            assert live.result_of(other)["meta_info"]["finish_reason"]["type"] == "abort"
        aborted = live.result_of(answer)
        if suspended:
            unpause(live)
    tokens = len(aborted["output_ids"])
    assert 3 <= tokens < LENGTH
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert aborted["meta_info"]["april"]["spans"][-1]["end"] == tokens
    kind = live.result_of(other)["meta_info"]["finish_reason"]["type"]
    assert kind == ("length" if by == "rid" else "abort")
    assert live.server.state()["attached"] == {}


def test_disconnect_aborts(live: LiveServer) -> None:
    with live.server.slowed(), httpx.Client(base_url=live.server.url) as client:
        with client.stream("POST", "/generate", json=body(stream=True), headers=HEADERS) as answer:
            lines = answer.iter_lines()
            next(lines)
            pause(live, "in_place")
            assert_suspended(live)
        until(lambda: live.server.state()["attached"] == {}, "the request is gone")
        unpause(live)


def test_parallel_samples_and_batches(live: LiveServer) -> None:
    """Three choices for each of two prompts; every choice is exact."""
    v = live.version
    with live.server.slowed():
        several = {"sampling_params": {**PARAMS, "n": 3}, "input_ids": [IDS, [1, 2]]}
        answer = begin(live, headers={"x-april-run": "agents"}, **several)
        live.server.post("/april/push/begin")
        assert live.load(1)["success"]
        live.server.post("/april/push/end")
    live.policies[v + 1] = live.model(1)
    answers = live.result_of(answer)
    assert len(answers) == 6
    for i, one in enumerate(answers):
        assert len(one["output_ids"]) == LENGTH
        assert [s["version"] for s in one["meta_info"]["april"]["spans"]] == [v, v + 1]
        check_tokens(live, one, IDS if i < 3 else [1, 2])


def test_the_end_of_several_choices_leaves_other_requests_alone(live: LiveServer) -> None:
    """SGLang aborts by the beginning of a rid, and the rid that the request names is not that of its choices."""
    for rid in ("call", ""):
        with live.server.slowed():
            other = live.in_background(generate, live, headers={}, rid=f"{rid}_0 of another client")
            until(lambda: live.server.state()["pool"]["running"] == 1, "the other request runs")
            few = {**PARAMS, "n": 2, "max_new_tokens": 3}
            generate(live, headers={"x-april-run": "agents"}, rid=rid, sampling_params=few)
            assert not other.done()
        assert live.result_of(other)["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openai_routes(live: LiveServer, route: str) -> None:
    v = live.version
    asked = {"messages": [{"role": "user", "content": "1 2"}]} if "chat" in route else {"prompt": "1 2"}
    fields = {"model": "m", "max_tokens": 40, "ignore_eos": True, "temperature": 0, **asked}
    plain = live.server.post(route, fields)["choices"]
    with live.server.slowed():
        before = live.decodes()
        answer = live.in_background(live.server.http.post, route, json=fields, headers=HEADERS)
        until(lambda: live.decodes() > before + 3, "the request decodes")
        pause(live, "abort")
        assert_suspended(live)
        unpause(live)
    reply = live.result_of(answer).json()
    assert reply["choices"] == plain
    assert [[s["version"] for s in one["spans"]] for one in reply["metadata"]["april"]] == [[v]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"return_hidden_states": True}, "return_hidden_states: is not supported"),
        ({"token_ids_logprob": [1, 2]}, "token_ids_logprob: is not supported"),
    ],
)
def test_what_would_not_survive_is_refused(live: LiveServer, fields: dict[str, Any], message: str) -> None:
    answer = live.server.http.post("/generate", json=body(**fields), headers=HEADERS)
    assert answer.status_code == 400
    assert message in answer.text


def test_beside_a_round(live: LiveServer, run: str) -> None:
    """The end of a round suspends the round's samples, and leaves attached requests alone."""
    v = live.version
    with live.server.slowed():
        answer = begin(live)
        prompts = [
            {"id": f"p{i}", "input_ids": [i + 1], "sampling_params": {"max_new_tokens": 8 + 40 * i}} for i in (0, 1)
        ]
        reply = live.server.rollout(run=run, prompts=prompts, quota=1)
        assert reply["end_reason"] == "quota"
        assert not answer.done()
        live.server.post("/april/drop", {"run": run})
    check(live, live.result_of(answer), (v, "fresh"))
