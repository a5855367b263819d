"""Tests of other projects' packages are skipped where no package index can be reached."""

from collections.abc import Callable

import pytest

from tests.integration.slime_fixtures import imported
from tests.support.packages import unpacked


def miles(factory: pytest.TempPathFactory) -> None:
    with imported("miles", factory):
        pass


def verl(factory: pytest.TempPathFactory) -> None:
    unpacked(["verl==0.9.1"], factory.mktemp("packages"))


@pytest.mark.parametrize("obtain", [miles, verl])
def test_without_an_index_the_test_is_skipped(
    obtain: Callable[[pytest.TempPathFactory], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("MILES_PATH", "")
    with pytest.raises(pytest.skip.Exception, match="No matching distribution"):
        obtain(tmp_path_factory)
