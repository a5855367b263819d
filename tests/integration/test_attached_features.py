"""Features of attached requests: OpenAI's client, streams, features, little memory (`attached-request`)."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from tests.integration import test_attached
from tests.integration.test_attached import HEADERS, PARAMS, begin, body, check_tokens, generate
from tests.integration.test_interruptions import PAUSES, pause, unpause
from tests.integration.test_parked_kv import prefilled
from tests.support.buckets import buckets_of, send
from tests.support.live import LiveServer, until
from tests.support.oracle import LOGPROB_LIMIT
from tests.support.workload import prompt

own_trajectory = test_attached.own_trajectory
TOKENS = 120
"""Of an answer to OpenAI's client: some are drawn between any two interruptions."""
PUSHES = 4
_numbers = itertools.count()

FEATURES: dict[str, dict[str, Any]] = {
    "top logprobs": {"top_logprobs_num": 3},
    "stop string": {"sampling_params": {"stop": ["1", "a", "7"], "min_new_tokens": 20}},
    "grammar": {"sampling_params": {"regex": "([a-z]{4} ){6}end"}},
    "bias": {"sampling_params": {"logit_bias": {"70": 4.0, "71": 4.0}}},
    "greedy": {"sampling_params": {"temperature": 0}},
    "no logprobs": {"return_logprob": False},
    "prompt logprobs": {"logprob_start_len": 0, "input_ids": list(range(5, 15))},
}
PENALTIES: dict[str, dict[str, Any]] = {
    name: {"sampling_params": {name: value}}
    for name, value in (("frequency_penalty", 1.5), ("presence_penalty", 1.5), ("repetition_penalty", 1.8))
}


def interruptions(live: LiveServer) -> list[Callable[[], Any]]:
    """Pauses of all modes; pushes of files and of tensors; a flush, a release of memory, the end of a round of the run.

    All push the weights that the server has.
    """

    def paused(mode: str, between: Callable[[], Any] = lambda: None) -> None:
        pause(live, mode)
        assert_no_steps(live)
        between()
        unpause(live)

    def tensors() -> None:
        live.server.post("/april/push/begin")
        for bucket in buckets_of(live.model(0), 2):
            assert send(live.server, bucket)["success"]
        live.server.post("/april/push/end")

    def release() -> None:
        live.server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
        assert_no_steps(live)
        live.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    def a_round_ends() -> None:
        prompts = [prompt(f"of the run {next(_numbers)}", 4)]
        assert live.server.rollout(run="agents", prompts=prompts, quota=1)["end_reason"] == "quota"

    return [
        *(lambda mode=mode: paused(mode) for mode in PAUSES),  # type: ignore[misc]
        lambda: live.push(0),
        lambda: live.load(0),
        lambda: paused("retract", lambda: live.load(0, flush=False)),
        tensors,
        lambda: live.server.post("/flush_cache"),
        release,
        a_round_ends,
    ]


def assert_no_steps(live: LiveServer) -> None:
    before = len(live.server.forwards())
    assert live.running() == 0
    assert len(live.server.forwards()) == before


def ask(client: OpenAI, *, chat: bool, streams: bool, n: int) -> Any:
    """A response of `n` choices, or the list of its chunks."""
    fields: dict[str, Any] = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "n": n, "stream": streams}
    fields["extra_body"] = {"ignore_eos": True}
    if chat:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": "1 2"}], **fields)
    else:
        answer = client.completions.create(prompt="1 2", **fields)
    return list(answer) if streams else answer


def texts_of(chunks: list[Any]) -> list[str]:
    """The text of each choice of a stream."""
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        piece = choice.delta.content if hasattr(choice, "delta") else choice.text
        texts[choice.index] = texts.get(choice.index, "") + (piece or "")
    return [text for _, text in sorted(texts.items())]


@pytest.mark.parametrize("chat", [True, False])
def test_openai_client(live: LiveServer, chat: bool) -> None:
    """Over all interruptions, streaming or not: the text of an undisturbed answer, and spans in the last chunk only."""
    url, v = f"{live.server.url}/v1", live.version
    client = OpenAI(base_url=url, api_key="none", default_headers={"x-april-run": "agents"})
    plain = ask(OpenAI(base_url=url, api_key="none"), chat=chat, streams=True, n=2)
    assert not any((chunk.model_extra or {}).get("metadata") for chunk in plain)
    with live.server.slowed():
        before = live.decodes()
        answers = [live.in_background(ask, client, chat=chat, streams=streams, n=2) for streams in (True, False)]
        until(lambda: live.decodes() > before + 3, "the requests decode")
        for interrupt in interruptions(live):
            interrupt()
            live.wait_decodes(3)
        assert not any(answer.done() for answer in answers)
    chunks, reply = map(live.result_of, answers)
    assert texts_of(chunks) == texts_of(plain)
    assert [choice.message.content if chat else choice.text for choice in reply.choices] == texts_of(plain)
    described = [chunk for chunk in chunks if "metadata" in (chunk.model_extra or {})]
    assert described == chunks[-1:]
    metadata = reply.metadata if chat else reply.model_extra["metadata"]
    for choice in [*chunks[-1].model_extra["metadata"]["april"], *metadata["april"]]:
        assert (choice["run"], choice["trajectory"], choice["staleness"]) == ("agents", None, PUSHES)
        assert [span["version"] for span in choice["spans"]] == list(range(v, v + PUSHES + 1))
        assert choice["spans"][-1]["end"] == TOKENS


def with_features(live: LiveServer, features: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One answer for each feature, from requests that run together."""
    answers = {
        name: live.in_background(
            generate, live, **{**fields, "sampling_params": {**PARAMS, **fields.get("sampling_params", {})}}
        )
        for name, fields in features.items()
    }
    return {name: live.result_of(answer) for name, answer in answers.items()}


def test_features(live: LiveServer) -> None:
    """Stop strings, grammars, biases, logprobs of several kinds: as in requests that were never suspended."""
    features = FEATURES if live.server.state()["overlap"] else FEATURES | PENALTIES
    plain = with_features(live, features)
    with live.server.slowed():
        answers = live.in_background(with_features, live, features)
        until(lambda: live.running() == len(features), "all requests run")
        for interrupt in interruptions(live):
            live.wait_decodes(3)
            interrupt()
    for name, answer in live.result_of(answers).items():
        wanted, meta = plain[name], answer["meta_info"]
        assert (answer["output_ids"], answer["text"]) == (wanted["output_ids"], wanted["text"]), name
        assert meta["finish_reason"] == wanted["meta_info"]["finish_reason"], name
        assert meta["april"]["spans"][-1]["end"] == len(answer["output_ids"]), name
        for kind in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs"):
            assert_logprobs(meta.get(kind), wanted["meta_info"].get(kind))


def assert_logprobs(actual: Any, wanted: Any) -> None:
    if not isinstance(wanted, list):
        assert actual == wanted
    elif wanted and isinstance(wanted[0], float | None):
        assert actual[1:] == wanted[1:]
        assert actual[0] == (None if wanted[0] is None else pytest.approx(wanted[0], abs=LOGPROB_LIMIT))
    else:
        assert len(actual) == len(wanted)
        for a, w in zip(actual, wanted, strict=True):
            assert_logprobs(a, w)


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_refused_in_the_overlap_loop(live: LiveServer, name: str) -> None:
    """With the message for samples; for a request without a run, SGLang applies penalties itself."""
    asked = body(sampling_params={"max_new_tokens": 2, **PENALTIES[name]["sampling_params"]})
    answer = live.server.http.post("/generate", json=asked, headers=HEADERS)
    overlap = live.server.state()["overlap"]
    assert answer.status_code == (400 if overlap else 200)
    assert (f"{name}: penalties need --disable-overlap-schedule" in answer.text) is overlap
    assert live.server.http.post("/generate", json=asked).status_code == 200


def test_suspended_in_the_middle_of_its_prefill(live: LiveServer) -> None:
    """A prompt of several chunks is prefilled again; logprobs of the prompt are complete."""
    asked = {"input_ids": [1 + i % 400 for i in range(400)], "logprob_start_len": 0}
    plain = generate(live, **asked)
    live.server.post("/flush_cache")
    with live.server.slowed():
        before = len(live.server.forwards())
        answer = live.in_background(generate, live, **asked)
        until(lambda: len(live.server.forwards()) > before + 1, "the prefill has begun")
        pause(live, "retract")
        assert_no_steps(live)
        unpause(live)
    reply = live.result_of(answer)
    assert reply["output_ids"] == plain["output_ids"]
    assert_logprobs(reply["meta_info"]["input_token_logprobs"], plain["meta_info"]["input_token_logprobs"])


def test_little_memory(small: LiveServer) -> None:
    """Twelve requests of 100 tokens in 400 tokens of KV, over a push of other weights."""
    live, v = small, small.version
    asked = [body(input_ids=[7, 8, 9 + i], sampling_params={**PARAMS, "max_new_tokens": 100}) for i in range(12)]
    answers = [live.in_background(live.server.http.post, "/generate", json=one, headers=HEADERS) for one in asked]
    live.wait_decodes(20)
    live.push(1)
    groups = []
    for i, answer in enumerate(answers):
        reply = live.result_of(answer)
        assert reply.status_code == 200, reply.text
        meta = reply.json()["meta_info"]
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        sample = {"index": 0, "output_ids": reply.json()["output_ids"], "logprobs": logprobs, "seed": 41}
        sample["spans"] = meta["april"]["spans"]
        groups.append({"id": str(i), "prompt_ids": asked[i]["input_ids"], "samples": [sample]})
    live.check(groups, {group["id"]: {"temperature": 0.8} for group in groups})
    assert {span["version"] for group in groups for span in group["samples"][0]["spans"]} <= {v, v + 1}


def test_a_resumed_request_is_bit_identical(live: LiveServer) -> None:
    """At one policy version, eight suspends and copies to the host and back change no bit of an answer."""
    answers = []
    for suspends in (0, 8):
        live.server.post("/flush_cache")  # the prompt is prefilled alike
        with live.server.slowed():
            answer = begin(live)
            for _ in range(suspends):
                live.server.post("/flush_cache")
                live.wait_decodes(3)
            assert not answer.done()
        answers.append(live.result_of(answer))
    plain, resumed = answers
    assert resumed["output_ids"] == plain["output_ids"]
    assert resumed["meta_info"]["output_token_logprobs"] == plain["meta_info"]["output_token_logprobs"]
    assert resumed["meta_info"]["april"]["spans"] == plain["meta_info"]["april"]["spans"]


def test_a_request_resumes_from_disk(small: LiveServer) -> None:
    """The host's 146 tokens are too few for its KV, with which it continues under the next version."""
    live, v = small, small.version
    ids = [1 + i % 50 for i in range(200)]
    with live.server.slowed():
        answer = begin(live, input_ids=ids)
        pause(live, "in_place")
        assert live.load(1)["success"]
        live.policies[v + 1] = live.model(1)
        until(lambda: live.server.state()["tokens"]["disk"] >= 200, "it is on disk")
        before = prefilled(live)
        unpause(live)
    reply = live.result_of(answer)
    assert [(s["version"], s["kv"]) for s in reply["meta_info"]["april"]["spans"]] == [(v, "fresh"), (v + 1, "kept")]
    assert prefilled(live) == before
    check_tokens(live, reply, ids)


def test_disconnect_of_a_suspended_request(live: LiveServer) -> None:
    """The client of an answer that is not streamed goes: SGLang notices, and the request is aborted."""
    import httpx

    with live.server.slowed(), httpx.Client(base_url=live.server.url, timeout=1.0) as client:
        with pytest.raises(httpx.TimeoutException):
            client.post("/generate", json=body(sampling_params={**PARAMS, "max_new_tokens": 400}), headers=HEADERS)
        pause(live, "in_place")
        until(lambda: live.server.state()["attached"] == {}, "the request is gone")
        unpause(live)
