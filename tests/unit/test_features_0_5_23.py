"""What SGLang 0.5.23 does differently from 0.5.17, with which most tests run."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput

from sglang_april.adapter.core import harmful_values, hooks_attached, hooks_control
from sglang_april.adapter.core.attach_request import RUN, attach
from sglang_april.adapter.core.capacity import Capacity
from sglang_april.adapter.shapes.installed import shape
from sglang_april.adapter.shapes.v0_5_23 import Release0523
from sglang_april.api.errors import RequestError
from sglang_april.http.prepare import RequestBuilder


def request(**params: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=[1, 2], sampling_params=params)


# --- beam search: a suspend stores one row of a request


def test_a_beam_search_belongs_to_no_run() -> None:
    with pytest.raises(ValueError, match="beam_width"):
        attach(request(beam_width=2), {RUN: "r"}, None)
    with pytest.raises(ValueError, match="beam_width"):
        attach(request(beam_width="2"), {RUN: "r"}, None)
    assert attach(request(beam_width=2), {}, "default") is None
    assert attach(request(beam_width=1), {}, "default") is not None


def test_a_preferred_beam_width_refuses_rounds() -> None:
    server: Any = SimpleNamespace(preferred={"beam_width": 2}, overlap=True)
    builder = RequestBuilder(SimpleNamespace(server_info=lambda: server), None)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="beam_width"):
        builder._intern(None, "")


def test_memory_for_the_next_decode_counts_the_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang aborts a beam search that finds none, although partials could be moved out of the pool."""
    rows = [SimpleNamespace(beam_group=None, finished=lambda: False) for _ in range(2)]
    rows[0].beam_group = SimpleNamespace(num_member_rows=15)
    coordinator = SimpleNamespace(_num_live_groups=1)
    monkeypatch.setattr(type(shape), "beam_rows", lambda _, s, reqs: Release0523().beam_rows(s, reqs))
    monkeypatch.setattr(type(shape), "committed", lambda _, _req: 7)
    s: Any = SimpleNamespace(
        page_size=1,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        running_batch=SimpleNamespace(reqs=rows),
        last_batch=None,
        chunked_req=None,
        beam_coordinator=coordinator,
    )
    assert (Capacity(s).tokens_for_next_decode(), Capacity(s).most_for_next_decode()) == (17, 17)
    coordinator._num_live_groups = 0
    assert not Release0523().beam_rows(s, iter(lambda: pytest.fail("no request is looked at"), None))


# --- aborts


class Aborted:
    """A request of a sample."""

    april, rid = "sample", "a"
    to_finish: str | None = None


@pytest.mark.parametrize(("message", "left"), [("Request waiting timeout reached.", []), (None, ["sample"])])
def test_a_sample_whose_time_is_up_ends(message: str | None, left: list[str]) -> None:
    """SGLang ends it by an abort of its `rid`; a client's abort of it is ignored."""
    sample, running = Aborted(), Aborted()
    s: Any = SimpleNamespace(
        april=SimpleNamespace(attached=SimpleNamespace(abort_named=lambda _: None)),
        waiting_queue=[sample],
        grammar_manager=SimpleNamespace(grammar_queue=[]),
        running_batch=SimpleNamespace(reqs=[running]),
        last_batch=None,
        chunked_req=None,
    )

    def aborts(scheduler: Any, recv_req: Any) -> None:
        scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r.rid != recv_req.rid]
        running.to_finish = "abort"

    hooks_control.abort(aborts, s, AbortReq(rid="a", abort_message=message))
    assert [r.april for r in s.waiting_queue] == left
    assert running.to_finish == ("abort" if message else None)


def test_a_pause_of_mode_abort_skips_what_the_scheduler_does_not_have() -> None:
    """SGLang sends one abort for each request, so that one sent too early leaves nothing for the client's own."""
    sent: list[str] = []
    states = {
        "queued": SimpleNamespace(obj=request(), dispatched=True),
        "tokenizing": SimpleNamespace(obj=request(), dispatched=False),
        "earlier release": SimpleNamespace(obj=request()),
    }
    manager: Any = SimpleNamespace(rid_to_state=states)
    token = hooks_attached._pausing.set(True)
    try:
        hooks_attached.abort(lambda _, rid: sent.append(rid), manager, abort_all=True)
    finally:
        hooks_attached._pausing.reset(token)
    assert sent == ["queued", "earlier release"]


# --- images, which are no longer pickled


def test_images_are_not_encoded_to_check_other_values() -> None:
    class Images(msgspec.Struct):
        feature: Any

    class Tokenized(msgspec.Struct):
        sampling_params: Any
        mm_inputs: Images | None
        logprob_start_len: int = -1

    params = SimpleNamespace(stop_token_ids=None, logit_bias=None, **dict.fromkeys(harmful_values.RANGES))
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harmful_values, "msgpack_encode", lambda message: sent.append(message.mm_inputs))
        patch.setattr(harmful_values, "msgpack_decode", lambda _: None)
        assert not harmful_values.problem(Tokenized(params, Images(object())), 8)
    assert sent == [None]


# --- labels of the weights


def test_a_new_label_of_the_weights_is_noted_at_suspended_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks for requests in its batches and queues, and at their `output_ids`."""
    serving = SimpleNamespace(weight_version="6")
    runtime, versions = ModuleType("runtime_context"), ModuleType("weight_versions")
    monkeypatch.setattr(runtime, "get_serving", lambda: serving, raising=False)
    monkeypatch.setattr(versions, "WeightVersionEvent", lambda old, tokens: (old, tokens), raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", runtime)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.weight_versions", versions)
    monkeypatch.setattr(hooks_control, "shape", Release0523())
    req = SimpleNamespace(weight_version_events=[])
    samples = [SimpleNamespace(request=req, length=10), SimpleNamespace(request=None, length=3)]
    s: Any = SimpleNamespace(
        april=SimpleNamespace(context=SimpleNamespace(ledger=SimpleNamespace(samples=lambda _: samples)))
    )

    def change(_: Any, label: str | None) -> None:
        serving.weight_version = label or serving.weight_version

    for label in ("7", None, "7"):
        hooks_control.record_weight_label(change, s, label)
    assert req.weight_version_events == [("6", 10)]
