"""Features of SGLang that the plugin accepts, each of which acts in another place than where a sample passes."""

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_april import config
from sglang_april.adapter.core import attached, frontend, hooks_http, hooks_scheduler, refusals
from sglang_april.adapter.core.attach_request import RUN, AuditRequest, attach, is_attached
from sglang_april.adapter.core.frontend import SGLangFrontend
from sglang_april.adapter.core.proximal import is_eligible
from sglang_april.adapter.core.restore_request import advance_grammar
from sglang_april.adapter.shapes.installed import shape
from sglang_april.http.prepare import PENALTIES_LAG


def request(**params: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=[1, 2], sampling_params=params)


# --- --preferred-sampling-params, which SGLang merges after a request is attached


def test_preferred_penalties_are_refused_as_a_requests_own() -> None:
    preferred = {"frequency_penalty": 0.5}
    with pytest.raises(ValueError, match=PENALTIES_LAG):
        attach(request(), {RUN: "r"}, None, overlap=True, preferred=preferred)
    assert attach(request(), {}, "default", overlap=True, preferred=preferred) is None, "it stays SGLang's"
    assert attach(request(frequency_penalty=0.0), {RUN: "r"}, None, overlap=True, preferred=preferred) is not None


def test_preferred_custom_params_stay() -> None:
    preferred = {"custom_params": {"thinking_budget": 9}}
    obj = request()
    attach(obj, {RUN: "r"}, None, preferred=preferred)
    assert obj.sampling_params == {"custom_params": {"thinking_budget": 9, RUN: "r"}}
    stock = request(temperature=0.5)
    assert attach(stock, {}, None, preferred=preferred) is None
    assert stock.sampling_params == {"temperature": 0.5}


# --- --april-audit with --april-attach


def test_the_audits_own_requests_belong_to_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Manager:
        server_args = SimpleNamespace(enable_priority_scheduling=False)

        async def generate_request(self, obj: Any) -> Any:
            assert attach(obj, {}, "default") is None
            sent.append(obj)
            yield {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": [(None, 1), (-1.0, 2)]}}

    monkeypatch.setattr(frontend.SGLangFrontend, "__init__", lambda self: None)
    front = SGLangFrontend()  # type: ignore[call-arg]
    front._manager, front._audit_key = Manager(), "audit"  # type: ignore[assignment]
    assert asyncio.run(front.rescore("a", [1, 2], 0, 1.0)) == [-1.0]
    assert isinstance(sent[0], AuditRequest)
    assert not is_attached(sent[0])


def test_warm_ups_of_sglang_are_refused_where_they_would_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = next(rule for rule in refusals.ARGUMENTS if "warmups" in rule.names)
    monkeypatch.setattr(config, "load", lambda: config.AprilConfig(attach="run"))
    assert not rule.accepts("compile-cache", None)
    monkeypatch.setattr(config, "load", lambda: config.AprilConfig())
    assert rule.accepts("compile-cache", None)


# --- --enable-strict-thinking, which gives every request a grammar


@pytest.mark.parametrize(
    ("reasoning", "given", "eligible"), [(False, {}, True), (True, {}, False), (False, {"regex": "a"}, False)]
)
def test_a_grammar_that_masks_nothing_prevents_no_proximal_logprobs(
    reasoning: bool, given: dict[str, Any], eligible: bool
) -> None:
    req: Any = SimpleNamespace(sampling_params=SamplingParams(**given), grammar=object(), require_reasoning=reasoning)
    assert is_eligible(req) is eligible


@pytest.mark.parametrize(("strict", "reasoning"), [(True, True), (True, False), (False, True)])
def test_limited_thinking_is_not_audited(monkeypatch: pytest.MonkeyPatch, strict: bool, reasoning: bool) -> None:
    monkeypatch.setattr(type(shape), "resolved", lambda _, args: args)
    s: Any = SimpleNamespace(server_args=SimpleNamespace(enable_strict_thinking=strict))
    recv_req: Any = SimpleNamespace(require_reasoning=reasoning, sampling_params=SamplingParams(temperature=1.0))
    assert attached._rescore(s, recv_req) == ("thinking_budget" if strict and reasoning else 1.0)


# --- a grammar of another backend, after a restart


def test_a_grammar_that_refuses_the_tokens_of_an_earlier_server_ends_its_request_only() -> None:
    class Grammar:
        def accept_token(self, token: int) -> NoReturn:
            raise ValueError(f"Tokens not accepted: {token}")

    req: Any = SimpleNamespace(grammar=Grammar(), output_ids=array("q", [3]), to_finish=None)
    advance_grammar(req)
    assert isinstance(req.to_finish, FINISH_ABORT)
    assert "Tokens not accepted: 3" in req.to_finish.message


# --- --skip-tokenizer-init, without which SGLang has no grammar backend


@pytest.mark.parametrize("skips", [False, True])
def test_grammars_need_a_tokenizer(monkeypatch: pytest.MonkeyPatch, skips: bool) -> None:
    args = SimpleNamespace(
        grammar_backend="xgrammar",
        skip_tokenizer_init=skips,
        enable_priority_scheduling=False,
        disable_overlap_schedule=False,
    )
    monkeypatch.setattr(type(shape), "resolved", lambda _, given: given)
    monkeypatch.setattr(frontend, "_model", lambda _: {})
    monkeypatch.setattr(frontend.SGLangFrontend, "__init__", lambda self: None)
    front = SGLangFrontend()  # type: ignore[call-arg]
    config_of_model = SimpleNamespace(vocab_size=8, dtype="torch.bfloat16")
    front._manager = SimpleNamespace(  # type: ignore[assignment]
        server_args=args,
        model_config=config_of_model,
        context_len=64,
        num_reserved_tokens=0,
        max_req_input_len=None,
        tokenizer=None,
        preferred_sampling_params=None,
    )
    assert front.server_info().grammar is not skips


# --- --weight-cache-mode, under which SGLang's scheduler raises in a release of weights


def test_weights_in_a_shared_cache_are_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(shape), "resolved", lambda _, args: args)
    manager: Any = SimpleNamespace(server_args=SimpleNamespace(weight_cache_mode="auto"))

    async def original(*_: Any) -> NoReturn:
        raise AssertionError("the scheduler would end")

    for tags in (None, ["weights"]):
        with pytest.raises(ValueError, match="--weight-cache-mode auto"):
            asyncio.run(hooks_http.release_when_idle(original, manager, SimpleNamespace(tags=tags)))


# --- answers


def test_a_description_names_the_tokens_of_the_answer() -> None:
    """With `max_new_tokens: 0`, SGLang draws a token that the answer does not have."""
    lengths: list[int] = []
    describing: Any = SimpleNamespace(description=lambda _, length: lengths.append(length) or {})
    sample = SimpleNamespace(group=SimpleNamespace(leg=None))
    req: Any = SimpleNamespace(
        april=sample, output_ids=[7], output_ids_through_stop=[], finished_reason=SimpleNamespace(to_json=dict)
    )
    with attached.described(describing, [req]):
        pass
    assert lengths == [0]


def test_an_aborted_request_has_waited_until_its_first_prefill() -> None:
    """A suspend has set `forward_entry_time` to 0, from which SGLang would report a negative time in the queue."""
    stats = SimpleNamespace(forward_entry_time=0.0, last_forward_entry_time=5.0)
    output = SimpleNamespace(unpack=lambda _: None)
    req: Any = SimpleNamespace(april_output=output, output_ids=[1], time_stats=stats, return_logprob=False)
    s: Any = SimpleNamespace(output_streamer=SimpleNamespace(stream_output=lambda *_: None))
    attached.answer_aborted(s, req)
    assert stats.forward_entry_time == 5.0


def test_a_request_with_tokens_that_sglang_gives_up_ends_at_the_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `recompute` after a push queues it with its tokens, where SGLang's waiting timeout sends only an `AbortReq`."""
    events: list[Any] = []
    output = SimpleNamespace(unpack=lambda _: None)
    stats = SimpleNamespace(forward_entry_time=1.0, last_forward_entry_time=1.0)
    sample = SimpleNamespace(attached=True)
    req: Any = SimpleNamespace(
        april=sample, april_output=output, output_ids=[1], time_stats=stats, return_logprob=False, rid="a"
    )
    streamer = SimpleNamespace(stream_output=lambda reqs, _: events.append(reqs[0].finished_reason.to_json()))
    controller = SimpleNamespace(aborted=lambda _, reason: events.append(reason["message"]))
    monkeypatch.setattr(hooks_scheduler.Process, "scheduler", SimpleNamespace(output_streamer=streamer))
    monkeypatch.setattr(hooks_scheduler.Process, "controller", controller)
    reason = {"type": "abort", "message": "too late", "status_code": 503}
    for tokens in ([1], []):
        req.output_ids = tokens
        message = AbortReq(rid="a", finished_reason=reason)
        hooks_scheduler.intercept_queue_abort(lambda *sent: events.append(sent[1]), None, message, req)
    assert events == [{**reason, "err_type": None}, "too late", "too late", message]
