"""A request of SGLang's own routes arrives in the scheduler, and becomes a sample of its run."""

import gc
import weakref
from array import array
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_april.adapter.core.attached import begin_attached
from sglang_april.api.types import RUN, TRAJECTORY
from tests.unit.leg_harness import LegHarness


class ArrivalScheduler:
    """What `begin_attached` uses of SGLang's scheduler; the controller is on the fake engine."""

    def __init__(self) -> None:
        self.controller = LegHarness(1)
        create = SimpleNamespace(create=lambda _sample, let_create: let_create())
        attached = self.controller.engine.controller.attached
        context = SimpleNamespace(audited=False, journalled=True, engine=create)
        self.april = SimpleNamespace(attached=attached, context=context)
        self.answers: list[Any] = []
        sender = SimpleNamespace(send_output=lambda answer, _: self.answers.append(answer))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=sender)
        self.max_req_input_len = 8
        self.server_args = SimpleNamespace(allow_auto_truncate=False)
        self.queued: list[Any] = []
        """What SGLang has queued."""

    def arrives(
        self, rid: str, trajectory: str | None = "t", custom: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        """Returns the request as SGLang reads it."""
        names = {RUN: "run"} | ({TRAJECTORY: trajectory} if trajectory is not None else {}) | (custom or {})
        given = {"input_ids": [5, 6, 7], "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
        params = SamplingParams(max_new_tokens=4, custom_params=names)
        request: Any = SimpleNamespace(rid=rid, sampling_params=params, **{**given, **fields})
        begin_attached(lambda _, queued: self.queued.append(queued), self, request)  # type: ignore[arg-type]
        return request

    def prompts(self) -> list[list[int]]:
        """Those of the legs that wait."""
        trajectories = self.controller.context.trajectories["run"].active.values()
        return [leg.prompt.tolist() for trajectory in trajectories for leg in trajectory.pending.values()]


def test_the_refusal_of_a_request_has_the_status_that_sglangs_streams_look_for() -> None:
    """They test its type. A plain number ended an OpenAI stream as if the model had drawn nothing."""
    scheduler = ArrivalScheduler()
    scheduler.controller.open("run", None)
    scheduler.controller.done("run", reject=("t",))
    scheduler.arrives("late")
    (answer,) = scheduler.answers
    assert not scheduler.queued
    assert isinstance(answer, AbortReq)
    assert answer.finished_reason is not None
    assert isinstance(answer.finished_reason["status_code"], HTTPStatus)
    assert answer.finished_reason["status_code"] == 400


@pytest.mark.parametrize("truncates", [False, True])
def test_the_record_has_the_prompt_that_sglang_truncates(truncates: bool) -> None:
    """Without `--allow-auto-truncate`, SGLang refuses the request that it gets."""
    scheduler = ArrivalScheduler()
    scheduler.server_args.allow_auto_truncate = truncates
    for length in (8, 11):
        scheduler.arrives(f"r{length}", f"t{length}", input_ids=list(range(length)))
    assert scheduler.prompts() == [list(range(8)), list(range(8 if truncates else 11))]


@pytest.mark.parametrize("trajectory", ["t", None])
def test_a_request_that_asks_for_no_logprobs_gets_none_of_its_prompt(trajectory: str | None) -> None:
    """Those of a leg's output are computed for its record. Its prompt's would keep it from the KV of the leg before."""
    scheduler = ArrivalScheduler()
    request = scheduler.arrives("a", trajectory, logprob_start_len=0, top_logprobs_num=5)
    assert (request.return_logprob, request.logprob_start_len) == (trajectory is not None, -1)
    assert request.top_logprobs_num == 0
    ((sample,),) = (run.groups.values() for run in scheduler.controller.context.ledger.runs.values())
    assert sample.params, "it is journalled"
    asked = scheduler.arrives("b", trajectory, return_logprob=True, logprob_start_len=0, top_logprobs_num=5)
    assert (asked.logprob_start_len, asked.top_logprobs_num) == (0, 5)


def test_sglang_gets_the_custom_params_without_the_names() -> None:
    """SGLang adds the request to what is left, if anything is: a cycle that only a garbage collection would free."""
    scheduler = ArrivalScheduler()
    assert scheduler.arrives("a").sampling_params.custom_params is None
    assert scheduler.arrives("b", custom={"thinking_budget": 3}).sampling_params.custom_params == {"thinking_budget": 3}


@pytest.mark.parametrize("custom", [None, {"thinking_budget": 3}])
def test_an_attached_request_is_freed_without_a_garbage_collection(custom: dict[str, Any] | None) -> None:
    """Of SGLang's own class. The other case shows that the test can fail."""
    params = ArrivalScheduler().arrives("a", custom=custom).sampling_params
    params.normalize(None)
    req = Req("a", "", array("q", [5, 6, 7]), params)
    known = weakref.ref(req)
    gc.disable()
    try:
        del req, params
        assert (known() is None) == (custom is None)
    finally:
        gc.enable()
