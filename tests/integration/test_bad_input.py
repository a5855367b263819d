"""Malformed input on a live server: a 4xx that names the field, and no change of state.

A valid request gets one wrong value; hypothesis draws its place and the value.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.server import Server

EXAMPLES = 2000
VALID: dict[str, Any] = {
    "run": "bad-input",
    "round_id": "never-opened",
    "prompts": [
        {"id": "p0", "input_ids": [5, 6, 7], "n": 2, "sampling_params": {"max_new_tokens": 4}, "metadata": {"k": [1]}},
        {"id": "p1", "text": "one two", "top_logprobs_num": 1},
        {"id": "p2", "messages": [{"role": "user", "content": "hello"}]},
    ],
    "sampling_params": {"temperature": 0.7, "top_p": 0.9, "stop": ["x"], "logit_bias": {"3": 1.0}},
    "quota": 2,
    "quota_unit": "group",
    "kv": "keep",
    "max_staleness": 3,
    "surplus": "carry",
    "tier": "auto",
    "proximal": False,
    "stream": False,
}

text_wrong = st.sampled_from([None, 1, 1.5, True, [], {}, "", "x" * 257])
count_wrong = st.sampled_from([0, -1, -(2**31), 2**31, 2**63, 2**64 - 1, 1.5, "3", True, [], {}]) | st.floats(
    allow_nan=False, allow_infinity=False
)
flag_wrong = st.sampled_from([0, 1, "true", None, [], {}])
choice_wrong = st.sampled_from([None, 1, [], {}]) | st.text(max_size=8).map(lambda text: text + "?")
ids_wrong = st.sampled_from([[], {}, "ab", 5, True, [[1]], [None], ["1"], [1.5], [True]]) | st.lists(
    st.integers(-(2**63), -1) | st.integers(2**20, 2**63), min_size=1, max_size=4
)
number_wrong = st.sampled_from([-0.5, 1e9, "1", True, [], {}])
object_wrong = st.sampled_from([1, "x", True, [1]])
list_wrong = st.sampled_from([None, 1, "x", {}, [1], [[]]])

SPOILED: dict[tuple[str | int, ...], st.SearchStrategy[Any]] = {
    ("run",): text_wrong,
    ("round_id",): st.sampled_from(["", "x" * 257, "a b", "a/b", "ü", "..", 1, True, [], {}]),
    ("prompts",): list_wrong,
    ("quota",): count_wrong,
    ("quota_unit",): choice_wrong,
    ("count",): choice_wrong,
    ("kv",): choice_wrong,
    ("max_staleness",): st.sampled_from([-1, 2**31, 1.5, "3", True, [], {}]),
    ("surplus",): choice_wrong,
    ("after_quota",): choice_wrong,
    ("ahead",): count_wrong,
    ("quota_mode",): choice_wrong,
    ("cohort_rounds",): count_wrong,
    ("concurrency",): count_wrong | st.just("all"),
    ("tier",): choice_wrong,
    ("proximal",): flag_wrong,
    ("keep_until_ack",): flag_wrong,
    ("stream",): flag_wrong,
    ("sampling_params",): object_wrong,
    ("sampling_params", "temperature"): number_wrong,
    ("sampling_params", "top_p"): number_wrong | st.just(0),
    ("sampling_params", "top_k"): st.sampled_from([0, -2, 2**31, 1.5, "1", True]),
    ("sampling_params", "min_p"): number_wrong | st.just(1.1),
    ("sampling_params", "max_new_tokens"): count_wrong | st.integers(2**20, 2**31 - 1),
    ("sampling_params", "stop"): st.sampled_from([1, [1], [None], "", [""], {}]),
    ("sampling_params", "stop_regex"): st.sampled_from([1, "(", "[", "*", ["a", "("], {}]),
    ("sampling_params", "stop_token_ids"): ids_wrong.filter(lambda value: value != []),
    ("sampling_params", "logit_bias"): st.sampled_from([{"-1": 1}, {"x": 1}, {"99999999": 1}, {"1": "a"}, [1], 3]),
    ("sampling_params", "sampling_seed"): st.sampled_from([2**63, -(2**63) - 1, 1.5, "1", True]),
    ("sampling_params", "n"): st.integers(1, 4),
    ("sampling_params", "custom_params"): st.just({}),
    ("prompts", 0): object_wrong | st.none(),
    ("prompts", 0, "id"): text_wrong | st.sampled_from(["p1", "p2"]),
    ("prompts", 0, "n"): count_wrong | st.integers(2**14 + 1, 2**31 - 1),
    ("prompts", 0, "input_ids"): ids_wrong | st.integers(2**14, 2**15).map(lambda n: [1] * n) | st.none(),
    ("prompts", 0, "text"): st.sampled_from(["and text", 1, [], {}]),
    ("prompts", 0, "sampling_params"): object_wrong,
    ("prompts", 0, "sampling_params", "max_new_tokens"): count_wrong,
    ("prompts", 0, "sampling_params", "min_new_tokens"): st.integers(5, 2**31 - 1) | st.integers(-9, -1),
    ("prompts", 0, "metadata"): st.integers(2**64, 2**80),
    ("prompts", 1, "text"): st.sampled_from(["", 1, None, [], {}]),
    ("prompts", 1, "top_logprobs_num"): st.sampled_from([-1, 1024, 1025, 1.5, "1", None, True]),
    ("prompts", 1, "priority"): st.integers(-5, 5) | st.sampled_from(["high", 2**31, 1.5]),
    ("prompts", 1, "lora_path"): st.just("a"),
    ("prompts", 2, "messages"): st.sampled_from(
        [[], {}, "hi", [1], [{}], [{"role": "user"}], [{"content": "x"}], None]
    ),
    ("prompts", 2, "messages", 0, "content"): st.sampled_from([None, 1, [{"type": "image_url"}]]),
}
unknown_field = st.text(max_size=20).filter(lambda name: name not in VALID and not name.isidentifier())

spoiled = st.sampled_from(list(SPOILED)).flatmap(lambda place: st.tuples(st.just(place), SPOILED[place]))


def with_wrong_value(place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    body: Any = copy.deepcopy(VALID)
    inner = body
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    return body


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def comparable_state(http: httpx.Client) -> dict[str, Any]:
    """Return the server's state without its step counter."""
    response = http.get("/april/state")
    assert response.status_code == 200
    state = response.json()
    state.pop("step", None)
    return state


def is_refused(response: httpx.Response) -> dict[str, str]:
    assert 400 <= response.status_code < 500, (response.status_code, response.text[:300])
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"field", "reason"}
    assert body["error"]["field"]
    assert body["error"]["reason"]
    return body["error"]


def test_two_thousand_malformed_requests_are_refused(http: httpx.Client) -> None:
    before = comparable_state(http)
    sent = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(spoiled)
    def refuse(wrong: tuple[tuple[str | int, ...], Any]) -> None:
        nonlocal sent
        sent += 1
        place, value = wrong
        error = is_refused(http.post("/april/rollout", content=json.dumps(with_wrong_value(place, value)).encode()))
        assert error["field"].split(".")[0].split("[")[0] in (place[0], "body")

    refuse()
    assert sent >= EXAMPLES
    assert comparable_state(http) == before


def test_corrupt_bodies_are_refused(http: httpx.Client) -> None:
    before = comparable_state(http)
    valid = json.dumps(VALID).encode()

    @settings(max_examples=300, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(1, len(valid) - 1), st.binary(max_size=4), st.booleans())
    def refuse(cut: int, noise: bytes, packed: bool) -> None:
        content = valid[:cut] + b"\xff" + noise
        headers = {"content-type": "application/msgpack"} if packed else {}
        is_refused(http.post("/april/rollout", content=content, headers=headers))

    refuse()
    assert comparable_state(http) == before


def test_unknown_fields_are_refused(http: httpx.Client) -> None:
    before = comparable_state(http)

    @settings(max_examples=200, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([(), ("prompts", 0), ("sampling_params",)]), unknown_field)
    def refuse(place: tuple[str | int, ...], name: str) -> None:
        is_refused(http.post("/april/rollout", content=json.dumps(with_wrong_value((*place, name), 1)).encode()))

    refuse()
    assert comparable_state(http) == before


NAMED = [
    ("POST", "/april/push/end", b"", 409),
    ("POST", "/april/push/begin", b'{"version": "new"}', 400),
    ("POST", "/april/push/begin", b'{"version": 9223372036854775808}', 400),
    ("POST", "/april/drop", b"{}", 400),
    ("POST", "/april/drop", b'{"run": ""}', 400),
    ("POST", "/april/drop", b'{"run": "a", "ids": "b"}', 400),
    ("POST", "/april/rounds/none/stop", b"", 404),
    ("POST", "/april/rounds/none/ack", b"", 404),
    ("POST", "/april/rounds/none/judge", b'{"accept": []}', 404),
    ("POST", "/april/rounds/none/judge", b'{"accept": "a"}', 400),
    ("POST", "/april/rounds/none/extend", b'{"quota_add": 1}', 404),
    ("POST", "/april/rounds/none/extend", b'{"quota_add": -1}', 400),
    ("POST", "/april/rounds/none/stop", b'{"deliver": [1]}', 400),
    ("GET", "/april/rounds/none", b"", 404),
    ("GET", "/april/rounds/%FF", b"", 400),
    ("GET", "/april/rounds/" + "x" * 300, b"", 400),
    ("GET", "/april/state?check=2", b"", 400),
    ("GET", "/april/partials?run=", b"", 400),
    ("GET", "/april/partials?of=a", b"", 400),
    ("GET", "/april/rollout", b"", 404),
    ("DELETE", "/april/state", b"", 404),
    ("POST", "/april/unheard-of", b"{}", 404),
]


@pytest.mark.parametrize(("method", "path", "content", "status"), NAMED)
def test_malformed_requests_to_other_routes_are_refused(
    http: httpx.Client, method: str, path: str, content: bytes, status: int
) -> None:
    before = comparable_state(http)
    response = http.request(method, path, content=content)
    is_refused(response)
    assert response.status_code == status
    assert comparable_state(http) == before


@pytest.mark.parametrize("path", ["/april/rollout", "/april/rounds/none/ack", "/april/push/begin"])
def test_a_chunked_body_beyond_the_limit_is_refused(http: httpx.Client, path: str) -> None:
    """Through SGLang's own middleware; no Content-Length announces the size."""

    def chunks() -> Iterator[bytes]:
        for _ in range(65):
            yield b" " * 2**20

    before = comparable_state(http)
    response = http.post(path, content=chunks())
    assert response.status_code == 413
    assert "--april-max-body-mb" in is_refused(response)["reason"]
    assert comparable_state(http) == before


def test_errors_use_the_requested_format(http: httpx.Client) -> None:
    response = http.post("/april/rollout", content=b'{"quota": 0}', headers={"accept": "application/msgpack"})
    assert msgspec.msgpack.decode(response.content)["error"]["field"] == "quota"


def test_prompt_id_in_use_refuses_the_whole_request(http: httpx.Client) -> None:
    held = {"id": "held", "input_ids": [5], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    quick = {"id": "quick", "input_ids": [6], "sampling_params": {"max_new_tokens": 1}}
    body = {"run": "in-use", "prompts": [held, quick], "quota": 1}
    assert http.post("/april/rollout", json=body).json()["finished"][0]["id"] == "quick"
    try:
        before = comparable_state(http)
        again = http.post("/april/rollout", json={"run": "in-use", "prompts": [{"id": "new", "input_ids": [5]}, held]})
        assert again.status_code == 409
        assert is_refused(again)["field"] == "prompts[1].id"
        assert comparable_state(http) == before
    finally:
        http.post("/april/drop", json={"run": "in-use"})


def test_server_still_serves_after_malformed_requests(http: httpx.Client) -> None:
    ok = {"run": "bad-input", "prompts": [{"id": "p", "input_ids": [5], "sampling_params": {"max_new_tokens": 2}}]}
    reply = http.post("/april/rollout", json={**ok, "quota": 1}).json()
    assert [group["id"] for group in reply["finished"]] == ["p"]
