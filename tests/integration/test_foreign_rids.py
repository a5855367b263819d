"""Requests of other clients with the `rid` of samples (`isolated-samples`)."""

from typing import Any

import httpx
import pytest

from sglang_april.adapter import versions
from tests.integration.test_interruptions import finish, open_round
from tests.support.live import LiveServer

PARAMS = {"max_new_tokens": 8, "ignore_eos": True}
TEXT = {"sampling_params": PARAMS, "return_logprob": True}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "1"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {**TEXT, "text": "1 2 3", "rid": "april.0.0"}),
        ("/generate", {**TEXT, "text": "1 2 3", "rid": "april.0.0", "stream": True}),
        ("/generate", {**TEXT, "text": ["1", "2"], "rid": ["mine", "april.0.1"]}),
        ("/v1/chat/completions", {**CHAT, "rid": "april.0.0"}),
        ("/v1/completions", {"model": "m", "prompt": "1 2", "max_tokens": 4, "rid": "april.0.0"}),
    ],
    ids=["generate", "stream", "batch", "chat", "completions"],
)
def test_reserved_rid_is_refused_while_samples_run(
    live: LiveServer, run: str, route: str, body: dict[str, Any]
) -> None:
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        answer = live.server.http.post(route, json=body)
        assert "the prefix 'april.' is reserved" in answer.text
        assert answer.status_code == 400 or body.get("stream")
        assert live.running() == 4
    finish(live, reply, (v, "fresh"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [1, 512]}, "input_ids: must be whole numbers from 0 to 511"),
        ({"input_ids": [[1], [-1]]}, "input_ids"),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens: must be a whole number"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": 513}, "top_logprobs_num"),
        ({"input_ids": [1], "sampling_params": {"custom_params": "x"}}, "custom_params: Expected"),
        ({"input_ids": [1], "sampling_params": {"custom_params": {"a": [[1]]}}}, "sampling_params.custom_params"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}, {"ignore_eos": "yes"}]}, "sampling_params.ignore_eos"),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**70}}, "sampling_params.sampling_seed"),
        ({"input_ids": [1], "sampling_params": {"top_k": 2**31}}, "sampling_params.top_k"),
        ({"input_ids": [1], "sampling_params": {"min_new_tokens": 1, "stop_token_ids": [512]}}, "stop_token_ids"),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {"1": 1e300}}}, "sampling_params.logit_bias"),
        ({"input_ids": [1], "sampling_params": {"repetition_penalty": 1e-44}}, "sampling_params.repetition_penalty"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": [0]}, "logprob_start_len: Expected"),
        ({"input_ids": [7] * 40, "return_logprob": True, "logprob_start_len": -7}, "logprob_start_len: must be"),
        ({"input_ids": [1], "lora_id": []}, "lora_id: Expected"),
        ({"input_ids": [1], "positional_embed_overrides": -7}, "positional_embed_overrides: Expected"),
    ],
)
def test_request_that_would_end_the_scheduler_is_refused(
    normal: LiveServer, body: dict[str, Any], message: str
) -> None:
    """SGLang 0.5.17 raises in its scheduler for each of these, which ends the server. 0.5.23 refuses some itself,
    and names no field."""
    answer = normal.server.http.post("/generate", json=body)
    assert answer.status_code in (400, 422)
    by_sglang = versions.installed()["sglang"] == "0.5.23" and "invalid type: " in answer.text
    assert by_sglang or message.split(":")[0].split(".")[-1] in answer.text
    assert normal.server.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})["output_ids"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"input_ids": []}),
        ("/generate", {"text": ""}),
        ("/generate", {"text": ["1", ""]}),
        ("/generate", {"text": "", "input_ids": []}),
        ("/generate", {"input_ids": [[1], []]}),
        ("/v1/completions", {"model": "m", "prompt": ""}),
        ("/v1/completions", {"model": "m", "prompt": [[]]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_without_tokens_is_refused(normal: LiveServer, route: str, body: dict[str, Any], stream: bool) -> None:
    """SGLang 0.5.17 lets some of them pass, and its scheduler ends in their prefill.

    It raises two seconds after the end of a refused stream, and so closes the connection, which no other test may use.
    """
    answer = httpx.post(f"{normal.server.url}{route}", json={**body, "stream": stream}, timeout=60)
    assert answer.status_code == 400 or "data: " in answer.text
    assert "empty" in answer.text or "no tokens" in answer.text or "should be provided" in answer.text
    assert normal.server.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})["output_ids"]


def test_one_list_of_tokens_for_a_batch_of_texts_is_refused(normal: LiveServer) -> None:
    answer = normal.server.http.post("/generate", json={"text": ["1", "2"], "input_ids": [7, 7]})
    assert answer.status_code == 400
    assert "input_ids: must be a list for each prompt" in answer.text


def test_rid_that_resembles_a_sample_is_an_ordinary_rid(live: LiveServer, run: str) -> None:
    v = live.version
    with live.server.slowed():
        reply = open_round(live, run)
        beside = live.server.post("/generate", {**TEXT, "text": "1 2 3", "rid": "april-0.0"})
        assert len(beside["output_ids"]) == len(beside["meta_info"]["output_token_logprobs"]) == 8
    finish(live, reply, (v, "fresh"))
