"""Which requests of SGLang's own routes belong to a run."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager

from sglang_april.adapter.core import hooks_attached
from sglang_april.adapter.core.attach_request import (
    GROUP,
    RUN,
    SEED,
    TRAJECTORY,
    attach,
    attachment_of,
    is_attached,
    seed_of,
)
from sglang_april.client import attach_through_router


def request(**fields: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=[1, 2], **fields)


def test_headers_name_run_and_trajectory() -> None:
    params = {"temperature": 0.5}
    obj = request(sampling_params=params)
    assert attach(obj, {RUN: "r", TRAJECTORY: "t"}, None) == ("r", "t", None)
    assert is_attached(obj)
    assert obj.sampling_params == {"temperature": 0.5, "custom_params": {RUN: "r", TRAJECTORY: "t"}}
    assert params == {"temperature": 0.5}, "the caller's own object"


def test_custom_params_name_them_and_keep_what_else_they_have() -> None:
    obj = request(sampling_params={"custom_params": {RUN: "r", TRAJECTORY: "t", GROUP: "g", "thinking_budget": 3}})
    assert attach(obj, {}, "other") == ("r", "t", "g")
    assert obj.sampling_params == {"custom_params": {RUN: "r", TRAJECTORY: "t", GROUP: "g", "thinking_budget": 3}}


def test_headers_that_sglangs_router_forwards_name_them() -> None:
    """An engine reached directly takes them too; those it reads first win."""
    headers = attach_through_router("r", "t", "g")
    assert headers["x-smg-routing-key"] == "r/t"
    obj = request()
    assert attach(obj, headers, "other") == ("r", "t", "g")
    assert obj.sampling_params == {"custom_params": {RUN: "r", TRAJECTORY: "t", GROUP: "g"}}
    assert attach(request(), {**headers, RUN: "mine"}, None) == ("mine", "t", "g")


def test_a_seed_of_the_run_gives_every_request_one_of_its_own() -> None:
    obj = request()
    attach(obj, {RUN: "r", SEED: "0"}, None)
    custom = obj.sampling_params["custom_params"]  # type: ignore[index,call-overload]
    assert custom == {RUN: "r", SEED: 0}
    seeds = [seed_of(custom, name, ids) for name in ("a", "b") for ids in (b"1", b"2")]
    assert len({*seeds, seed_of({SEED: 1}, "a", b"1")}) == 5
    assert seed_of(custom, "a", b"1") == seeds[0]
    assert seed_of({RUN: "r"}, "a", b"1") is None
    obj = request(sampling_params={"custom_params": {SEED: 3}})
    assert attach(obj, {}, None) is None
    assert obj.sampling_params == {"custom_params": None}


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", str(2**63), "²"])
def test_a_seed_is_a_whole_number(seed: str) -> None:
    with pytest.raises(ValueError, match=r"x-april-seed: must be a whole number from 0 to 2\^63 - 1"):
        attach(request(), {RUN: "r", SEED: seed}, None)


def test_a_seed_is_for_one_choice() -> None:
    with pytest.raises(ValueError, match="x-april-seed: needs n: 1"):
        attach(request(sampling_params={"n": 2}), {RUN: "r", SEED: "1"}, None)


def test_the_flag_attaches_the_others_but_health_checks() -> None:
    obj, health = request(), request(rid=f"{HEALTH_CHECK_RID_PREFIX}_1")
    assert attach(obj, {}, "default") == ("default", None, None)
    assert attachment_of(obj.sampling_params["custom_params"]) == ("default", None, None)  # type: ignore[index,call-overload]
    assert attach(health, {}, "default") is None
    assert not is_attached(health)
    assert attach(request(), {}, None) is None


def test_every_request_of_a_batch_is_attached() -> None:
    obj = GenerateReqInput(input_ids=[[1], [2]], sampling_params=[{"temperature": 0}, {"temperature": 1}])
    assert attach(obj, {RUN: "r"}, None) == ("r", None, None)
    assert [one["custom_params"] for one in obj.sampling_params] == [{RUN: "r"}] * 2  # type: ignore[union-attr,index]


def test_what_cannot_be_suspended_is_refused_if_it_names_a_run_and_stock_otherwise() -> None:
    with pytest.raises(ValueError, match="return_hidden_states: is not supported"):
        attach(request(return_hidden_states=True), {RUN: "r"}, None)
    obj = request(return_hidden_states=True)
    assert attach(obj, {}, "default") is None
    assert not is_attached(obj)
    assert attach(EmbeddingReqInput(text="1"), {RUN: "r"}, "default") is None


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("names", [{RUN: None}, {SEED: 7}, {SEED: 7, "thinking_budget": 3}])
@pytest.mark.parametrize("default", [None, "default"])
def test_a_request_that_is_not_attached_names_nothing_to_the_scheduler(
    default: str | None, names: dict[str, Any], batch: bool
) -> None:
    params: Any = {"temperature": 0.5, "custom_params": names}
    obj = request(sampling_params=[params] if batch else params, return_hidden_states=True)
    assert attach(obj, {}, default) is None
    assert not is_attached(obj)
    sent: Any = obj.sampling_params[0] if batch else obj.sampling_params  # type: ignore[index,call-overload]
    rest = {key: value for key, value in names.items() if not key.startswith("x-april")}
    assert sent == {"temperature": 0.5, "custom_params": rest or None}


@pytest.mark.parametrize("name", [TRAJECTORY, GROUP])
def test_what_names_a_trajectory_is_never_a_stock_request(name: str) -> None:
    """It would miss in the record. Its client has forgotten the run, or asks for what a leg cannot have."""
    with pytest.raises(ValueError, match=f"^{name}: needs x-april-run"):
        attach(request(), {name: "t"}, None)
    with pytest.raises(ValueError, match=f"^{name}: needs x-april-run"):
        attach(request(sampling_params={"custom_params": {name: "t"}}), {}, None)
    with pytest.raises(ValueError, match="return_hidden_states: is not supported"):
        attach(request(return_hidden_states=True), {name: "t"}, "default")
    assert attach(request(), {TRAJECTORY: "t", name: "t"}, "default")


def test_requests_of_a_batch_name_the_same_run() -> None:
    given: Any = [{"custom_params": {RUN: "a"}}, {"custom_params": {RUN: "b"}}]
    with pytest.raises(ValueError, match="x-april-run: must be the same in all requests of a batch"):
        attach(GenerateReqInput(input_ids=[[1], [2]], sampling_params=given), {}, None)
    with pytest.raises(ValueError, match="x-april-run: must be the same in all requests of a batch"):
        attach(GenerateReqInput(input_ids=[[1], [2]], sampling_params=[{}, *given]), {}, None)


@pytest.mark.parametrize("given", [7, "x", [7], [{}, None]])
def test_parameters_of_an_attached_request_are_objects(given: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params: must be an object"):
        attach(request(sampling_params=given), {RUN: "r"}, None)
    obj = request(sampling_params=given)
    assert attach(obj, {}, None) is None
    assert obj.sampling_params == given


@pytest.mark.parametrize("name", ["x" * 257, "a\0b", 7])
def test_a_run_is_named_by_a_string(name: Any) -> None:
    with pytest.raises(ValueError, match=r"x-april-run: must be a string of 1 to 256"):
        attach(request(sampling_params={"custom_params": {RUN: name}}), {}, None)


def test_a_leg_is_one_request() -> None:
    with pytest.raises(ValueError, match="x-april-trajectory: names one request"):
        attach(request(sampling_params={"n": 2}), {RUN: "r", TRAJECTORY: "t"}, None)
    with pytest.raises(ValueError, match="x-april-trajectory: names one request"):
        attach(GenerateReqInput(text=["a", "b"]), {RUN: "r", TRAJECTORY: "t"}, None)
    with pytest.raises(ValueError, match="x-april-group: needs x-april-trajectory"):
        attach(request(), {RUN: "r", GROUP: "g"}, None)


@pytest.mark.parametrize("batch", [False, True])
def test_penalties_are_refused_in_the_overlap_loop(batch: bool) -> None:
    params: Any = {"frequency_penalty": 0.5}
    given = [{"presence_penalty": 0.0}, params] if batch else params
    with pytest.raises(ValueError, match="frequency_penalty: penalties need --disable-overlap-schedule"):
        attach(request(sampling_params=given), {RUN: "r"}, None, overlap=True)
    assert attach(request(sampling_params=given), {RUN: "r"}, None) == ("r", None, None)
    assert attach(request(sampling_params=given), {}, "default", overlap=True) is None
    assert attach(request(sampling_params={"repetition_penalty": 1.0}), {}, "default", overlap=True)


def test_the_warm_up_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's own request, over HTTP before it is up; an engine without HTTP is never up."""
    defaults: list[str | None] = []
    monkeypatch.setattr(hooks_attached, "attach", lambda _obj, _headers, default, **_: defaults.append(default))
    manager: Any = SimpleNamespace(
        april=SimpleNamespace(config=SimpleNamespace(attach="default")),
        server_args=SimpleNamespace(disable_overlap_schedule=True),
        preferred_sampling_params=None,
        server_status=ServerStatus.Starting,
    )
    over_http: Any = SimpleNamespace(headers={})
    for asked in (over_http, None):
        hooks_attached.generate(lambda *_: "answers", manager, request(), asked)
    manager.server_status = ServerStatus.Up
    hooks_attached.generate(lambda *_: "answers", manager, request(), over_http)
    assert defaults == [None, "default", "default"]


def test_a_refused_stream_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang aborts what `rid` names two seconds after the end of a stream, and needs fields that it sets later."""
    aborted: list[Any] = []
    manager: Any = SimpleNamespace(
        april=SimpleNamespace(config=SimpleNamespace(attach=None)),
        server_args=SimpleNamespace(disable_overlap_schedule=True),
        preferred_sampling_params=None,
        server_status=ServerStatus.Up,
        abort_request=aborted.append,
    )
    obj = request(rid="another's", stream=True, return_hidden_states=True)
    asked: Any = SimpleNamespace(headers={RUN: "r"})
    with pytest.raises(ValueError, match="return_hidden_states"):
        hooks_attached.generate(lambda *_: "answers", manager, obj, asked)

    async def no_wait(_seconds: float) -> None: ...

    monkeypatch.setattr(asyncio, "sleep", no_wait)
    asyncio.run(TokenizerManager.create_abort_task(manager, obj)())
    assert aborted == []
