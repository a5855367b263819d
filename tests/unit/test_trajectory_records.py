"""What the records of trajectories keep of a `done` call."""

from sglang_april.api.requests import DoneBody
from sglang_april.http.trajectories import TrajectoryRecords


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
