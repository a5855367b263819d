"""Requests become samples by identity of the object, never by their `rid` (`isolated-samples`)."""

import time
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("sglang")

from sglang.srt.observability.req_time_stats import SchedulerReqTimeStats

from sglang_april.adapter.core import engine as engine_module
from sglang_april.adapter.core.engine import SchedulerEngine


def request(rid: str) -> Any:
    logprob = SimpleNamespace(top_logprobs_num=0)
    return SimpleNamespace(rid=rid, extra_key=None, output_ids=array("q"), logprob=logprob)


def test_only_the_request_created_for_a_sample_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SchedulerEngine.__new__(SchedulerEngine)
    engine.version, engine._creating = 3, None
    sample: Any = SimpleNamespace(request=None, journal=SimpleNamespace(snapshot=None), attached=False)
    created: list[Any] = []

    def handle_generate_request(body: Any) -> None:
        created.append(request(body))
        engine.adopt(created[-1])
        created.append(request(body))  # another one of the same rid
        engine.adopt(created[-1])

    engine._s = SimpleNamespace(handle_generate_request=handle_generate_request)  # type: ignore[assignment]
    monkeypatch.setattr(engine_module, "build_request", lambda _: "april.0.0")
    engine._create(sample)
    mine, other = created
    assert mine.april is sample is not None
    assert sample.request is mine
    assert other.april is None
    foreign = request("april.0.0")
    engine.adopt(foreign)
    assert foreign.april is None
    assert sample.request is mine
    assert {mine.extra_key, foreign.extra_key} == {"|v3"}


def test_no_timeout_counts_the_time_of_a_suspended_sample() -> None:
    """SGLANG_REQ_RUNNING_TIMEOUT counts from `forward_entry_time`, which SGLang sets once."""
    engine = SchedulerEngine.__new__(SchedulerEngine)
    req = MagicMock(output_ids=array("q", [1]), time_stats=SchedulerReqTimeStats())
    req.finished.return_value = False
    req.time_stats.forward_entry_time = 12.0
    sample: Any = SimpleNamespace(
        request=req, journal=SimpleNamespace(snapshot=None), kv=MagicMock(version=0), attached=False
    )
    engine._s = MagicMock(waiting_queue=[], chunked_req=None)
    engine._s.running_batch.reqs = [req]
    engine.pages, engine.version = MagicMock(), 0
    engine.detach([sample])
    assert req.time_stats.forward_entry_time == 0.0
    resumed = time.perf_counter()
    engine.attach([sample])
    assert req.time_stats.forward_entry_time >= resumed


def test_refused_request_leaves_nothing_to_adopt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SchedulerEngine.__new__(SchedulerEngine)
    engine.version, engine._creating = 0, None
    engine._s = SimpleNamespace(handle_generate_request=lambda _: None)  # type: ignore[assignment]
    monkeypatch.setattr(engine_module, "build_request", lambda _: None)
    engine._create(SimpleNamespace(request=None))  # type: ignore[arg-type]
    foreign = request("r")
    engine.adopt(foreign)
    assert foreign.april is None
