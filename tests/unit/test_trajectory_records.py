"""What the records of trajectories keep of a leg and of a `done` call."""

from typing import Any

import pytest

from sglang_april.api.messages import FinishedSample
from sglang_april.api.requests import DoneBody
from sglang_april.http.trajectories import TrajectoryRecords
from tests.unit.leg_harness import PROMPT, LegHarness


def test_a_trajectory_without_a_leg_keeps_its_group() -> None:
    """Its only request was refused after it had begun."""
    records = TrajectoryRecords()
    records.done("r", "t", "g", DoneBody(reward=1.0), 10)
    (record,) = records.take("r", ["t"])
    assert (record.fields(packed=False)["group"], record.fields(packed=False)["reward"]) == ("g", 1.0)


def test_metadata_counts_as_memory() -> None:
    records = TrajectoryRecords()
    before = records.of("r", "t", "g").nbytes
    records.done("r", "t", "g", DoneBody(metadata="m" * 100), 130)
    assert records.of("r", "t").nbytes == before + 130


def test_top_logprobs_of_a_leg_are_for_its_caller_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty per token are many times as large as what a record counts and returns."""
    w = LegHarness(replicas=1)
    finished = w.engine.finished

    def with_top(*args: Any) -> FinishedSample:
        result = finished(*args)
        result.top_logprobs = [[(-1.0, 5)] * 20] * 2
        return result

    monkeypatch.setattr(w.engine, "finished", with_top)
    w.leg("run", "a", PROMPT, 2, "t")
    w.step(6)
    leg = w.ended("a")
    assert leg is not None
    assert leg.result.top_logprobs is None
