"""Bodies: every kind of wrong value is refused by the name of its field."""

from typing import Any

import msgspec
import pytest

from tests.unit.bodies import accept, one, params, refuse

NAN, INF = float("nan"), float("inf")


TOP = [
    ("run", ["", "x" * 257, 1, None, [], True]),
    ("round_id", ["", "x" * 257, "a b", "a/b", "é", "a\n", ".", "..", 1, {}]),
    ("prompts", [None, {}, "x", [1], [None], [[]]]),
    ("quota", [0, -1, 2**31, 1.5, "1", True, [1], 10**30, 1e300]),
    ("quota_unit", ["groups", "", None, 1]),
    ("count", ["all", True, None]),
    ("kv", ["kept", None, 0]),
    ("max_staleness", [-1, 1.5, "5", 2**31, True]),
    ("surplus", ["drop", None]),
    ("after_quota", ["stop", "", True, None]),
    ("ahead", [0, -1, 1.5, "1", 2**31, None]),
    ("quota_mode", ["last", 1, None]),
    ("cohort_rounds", [0, -1, "1", 2**31, None]),
    ("proximal", ["yes", 1, None]),
    ("concurrency", [0, -1, "Auto", "all", 2**31, 1.5]),
    ("keep_until_ack", [1, "true", None]),
    ("tier", ["disk", "gpu", None]),
    ("stream", ["yes", 0, None]),
    ("sampling_params", [1, [], "x"]),
]
PROMPT = [
    ("id", ["", "x" * 257, 1, None, []]),
    ("n", [0, -1, 2**14 + 1, 1.5, "2", None, True]),
    (
        "input_ids",
        [[], "AAAA", [1.5], ["1"], [None], [True], [-1], [256], [2**31], [2**70], [[1]], list(range(90)), 7, {}],
    ),
    ("priority", [0, 2**31, "high", 1.5]),
    ("top_logprobs_num", [-1, 257, 1025, 1.5, None, "2"]),
    ("metadata", [2**64, -(2**63) - 1, {"a": [2**70]}]),
]
PARAMS = [
    ("max_new_tokens", [0, -1, 100, 2**31, 1.5, "9", [], [0], [4, 4], [1.5]]),
    ("min_new_tokens", [-1, "1", 2**31]),
    ("stop", ["", [""], 1, [1], {}]),
    ("stop_token_ids", [[-1], [256], ["1"], 1, [2**31]]),
    ("stop_regex", ["", [""], 1]),
    ("temperature", [-0.1, 1e7, "hot", [], True]),
    ("top_p", [0, -1, 1.01, "1"]),
    ("top_k", [0, -2, 1.5, 2**31]),
    ("min_p", [-0.1, 1.1]),
    ("frequency_penalty", [-2.1, 2.1, 1.0]),
    ("presence_penalty", [-2.1, 2.1, 0.5]),
    ("repetition_penalty", [0, 2.1, 1.1]),
    ("regex", ["(", 1]),
    ("json_schema", [{}, 1]),
    ("ignore_eos", ["yes", 1]),
    ("logit_bias", [{"x": 1}, {"256": 1}, {"-1": 1}, {"1": "a"}, {"1": 1e7}, [], {"²": 1}, {"1" * 99: 1}]),
    ("sampling_seed", [2**63, -(2**63) - 1, 1.5, "1"]),
    ("n", [2]),
    ("custom_params", [{}]),
    ("stream_interval", [1]),
    ("unheard_of", [1]),
]


def cases(table: list[tuple[str, list[Any]]]) -> list[Any]:
    return [pytest.param(name, value, id=f"{name}-{str(value)[:20]}") for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), cases(TOP))
def test_a_wrong_field_of_the_round_is_named(name: str, value: Any) -> None:
    assert refuse({name: value}).field.startswith(name)


def test_end_conditions_and_their_defaults_reach_the_scheduler() -> None:
    given = {"count": "accepted", "after_quota": "continue", "ahead": 3, "quota_mode": "cohort", "cohort_rounds": 2}
    plain = {"count": "finished", "after_quota": "suspend", "ahead": 1, "quota_mode": "first", "cohort_rounds": 1}
    for body, expected in ((given, given), ({}, plain)):
        command = accept(body)
        assert {name: getattr(command.spec, name) for name in expected} == expected


@pytest.mark.parametrize(("name", "value"), cases(PROMPT))
def test_a_wrong_field_of_a_prompt_is_named(name: str, value: Any) -> None:
    body = {"prompts": [{"id": "ok", "input_ids": [1]}, {"id": "a", "input_ids": [1], name: value}]}
    assert refuse(body).field.startswith(f"prompts[1].{name}")


@pytest.mark.parametrize(("name", "value"), cases(PARAMS))
def test_a_wrong_sampling_parameter_is_named_on_the_prompt_and_on_the_round(name: str, value: Any) -> None:
    assert refuse(params(**{name: value})).field.startswith(f"prompts[0].sampling_params.{name}")
    if name != "max_new_tokens" or value != 100:  # too long only together with a prompt
        assert refuse({"sampling_params": {name: value}}).field.startswith(f"sampling_params.{name}")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "frequency_penalty", "repetition_penalty"])
def test_nan_and_infinity_are_refused_in_msgpack_and_in_json(name: str, value: float) -> None:
    assert refuse(params(**{name: value}), packed=True).field == f"prompts[0].sampling_params.{name}"
    assert refuse(params(**{name: value})).field in ("body", f"prompts[0].sampling_params.{name}")
    assert refuse(one(metadata={"x": value}), packed=True).field == "prompts[0].metadata"
    assert refuse(params(logit_bias={"1": value}), packed=True).field.startswith(
        "prompts[0].sampling_params.logit_bias"
    )


def test_exactly_one_source_of_tokens() -> None:
    assert refuse({"prompts": [{"id": "a"}]}).field == "prompts[0].input_ids"
    assert refuse(one(text="x")).field == "prompts[0].text"
    assert refuse(one(messages=[])).field == "prompts[0].messages"
    assert refuse({"prompts": [{"id": "a", "text": ""}]}).field == "prompts[0].text"
    assert refuse({"prompts": [{"id": "a", "messages": []}]}).field == "prompts[0].messages"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content"),
        ({"role": 1, "content": "x"}, "role"),
    ],
)
def test_a_message_is_a_role_and_a_text(message: dict[str, Any], field: str) -> None:
    body = {"prompts": [{"id": "a", "messages": [message]}]}
    assert refuse(body).field == f"prompts[0].messages[0].{field}"


def test_error_of_the_chat_template_is_refused() -> None:
    body = {"prompts": [{"id": "a", "messages": [{"role": "assistant", "content": "x"}]}]}
    assert refuse(body).field == "prompts[0].messages"


def test_without_a_tokenizer_only_ids_are_taken() -> None:
    for source in ({"text": "x"}, {"messages": [{"role": "user", "content": "x"}]}):
        refused = refuse({"prompts": [{"id": "a", **source}]}, has_tokenizer=False)
        assert refused.field == f"prompts[0].{next(iter(source))}"
    accept(one(), has_tokenizer=False)


def test_the_same_id_twice_in_a_request() -> None:
    body = {"prompts": [{"id": "a", "input_ids": [1]}, {"id": "b", "input_ids": [1]}, {"id": "a", "input_ids": [1]}]}
    refused = refuse(body)
    assert (refused.field, refused.reason) == ("prompts[2].id", "is the same as prompts[0].id")


def test_too_many_samples_in_a_request() -> None:
    body = {"prompts": [{"id": str(i), "input_ids": [1], "n": 2**14} for i in range(65)]}
    assert refuse(body).field == "prompts"


def test_the_context_bounds_prompt_and_output_together() -> None:
    ids = [1] * 80
    assert accept(one(input_ids=ids, sampling_params={"max_new_tokens": 20}))
    refused = refuse(one(input_ids=ids, sampling_params={"max_new_tokens": 21}))
    assert refused.field == "prompts[0].sampling_params.max_new_tokens"
    assert refuse(one(text="x" * 90, input_ids=None)).field == "prompts[0].text"
    assert (
        refuse({**one(input_ids=ids), "sampling_params": {"max_new_tokens": 21}}).field
        == "sampling_params.max_new_tokens"
    )


def test_each_sample_may_have_a_length_of_its_own() -> None:
    assert accept(one(n=3, sampling_params={"max_new_tokens": [5, 9, 7]})).prompts[0].max_new_tokens == [5, 9, 7]
    assert accept(one(sampling_params={"max_new_tokens": 5})).prompts[0].max_new_tokens is None
    at = "prompts[0].sampling_params.max_new_tokens"
    assert refuse(one(n=3, sampling_params={"max_new_tokens": [5, 9]})).field == at
    assert refuse(one(n=2, input_ids=[1] * 80, sampling_params={"max_new_tokens": [5, 21]})).field == at
    body = {**one(n=2, sampling_params={"max_new_tokens": [5, 9]}), "sampling_params": {"min_new_tokens": 6}}
    assert refuse(body).field == at
    assert refuse({**one(), "sampling_params": {"max_new_tokens": [5]}}).field == "sampling_params.max_new_tokens"


def test_a_sample_with_all_its_top_logprobs_fits_into_a_row_of_the_journal() -> None:
    long = {"vocab_size": 2**16, "context_len": 2**17, "max_input_len": 2**17}
    assert accept(one(top_logprobs_num=1024, sampling_params={"max_new_tokens": 58_000}), **long)
    for sampling in ({"max_new_tokens": 59_000}, {"max_new_tokens": None}, {}):
        refused = refuse(one(top_logprobs_num=1024, sampling_params=sampling), **long)
        assert refused.field == "prompts[0].top_logprobs_num"


def test_parameters_that_contradict_each_other() -> None:
    assert refuse(params(max_new_tokens=4, min_new_tokens=5)).field.endswith("min_new_tokens")
    assert refuse(params(regex="a", ebnf="b")).field.endswith("ebnf")
    body = {**params(regex="a"), "sampling_params": {"json_schema": "{}"}}
    assert "only one grammar" in refuse(body).reason
    assert refuse(params(regex="a"), grammar=False).field.endswith("regex")


def test_penalties_are_taken_without_the_overlap_loop() -> None:
    body = params(frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2)
    assert accept(body, overlap=False)
    assert "--disable-overlap-schedule" in refuse(body).reason
    assert accept(params(frequency_penalty=0.0, repetition_penalty=1.0))
    tiny = refuse(params(repetition_penalty=1e-44), overlap=False)
    assert tiny.field == "prompts[0].sampling_params.repetition_penalty", "logits would not be finite"


def test_priority_needs_a_server_that_schedules_by_it() -> None:
    assert accept(one(priority=3), priority=True).prompts[0].priority == 3


@pytest.mark.parametrize(
    "name", ["lora_path", "return_routed_experts", "return_hidden_states", "image_data", "input_embeds"]
)
def test_unsupported_sglang_field_is_refused_with_a_reason(name: str) -> None:
    for body in (one(**{name: "x"}), {name: "x"}):
        refused = refuse(body)
        assert refused.field.endswith(name)
        assert "not supported" in refused.reason


def test_an_unknown_field_with_a_strange_name_is_still_an_error() -> None:
    refuse({"x` - at `$.y": 1})
    assert refuse({"": 1}).field == '""'
    assert len(refuse({"x" * 100_000: 1}).field) <= 500


def test_prompt_parameters_override_round_parameters() -> None:
    body = {
        "sampling_params": {"temperature": 0.5, "stop": "x", "sampling_seed": 5},
        "prompts": [
            {"id": "a", "input_ids": [1]},
            {"id": "b", "input_ids": [1], "sampling_params": {"stop": None, "sampling_seed": 6}},
            {"id": "c", "input_ids": [1], "sampling_params": {"sampling_seed": 7}},
        ],
    }
    opened = accept(body, preferred={"top_k": 5, "temperature": 0.1})
    merged = [msgspec.msgpack.decode(encoded) for encoded in opened.params]
    assert merged == [{"stop": "x", "temperature": 0.5, "top_k": 5}, {"stop": None, "temperature": 0.5, "top_k": 5}]
    assert [prompt.params for prompt in opened.prompts] == [0, 1, 0]
    assert [prompt.seed for prompt in opened.prompts] == [5, 6, 7]


def test_launch_flags_replace_absent_fields_but_not_null() -> None:
    assert accept({}).spec.quota == 8
    assert accept({"quota": None}).spec.quota is None
    assert accept({}).spec.max_staleness == 5
    assert accept({"max_staleness": None}).spec.max_staleness is None
    assert accept({"kv": "auto"}).spec.kv == "auto"
