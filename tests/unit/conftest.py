"""Fixtures of the scheduler's unit tests."""

import pytest

from tests.unit.controller_harness import Build, ControllerHarness


@pytest.fixture(params=["normal", "overlap"])
def harness(request: pytest.FixtureRequest) -> Build:
    """`harness(...)`: two replicas of a server with one of the two loops."""
    return lambda **engine: ControllerHarness(replicas=2, overlap=request.param == "overlap", **engine)
