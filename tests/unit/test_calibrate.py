"""A failure of the measurements of `kv: auto` at the start of a server."""

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from sglang_april.adapter.core import calibrate
from sglang_april.adapter.core.calibrate import measure
from sglang_april.adapter.shapes.installed import shape


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_: Any) -> NoReturn:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(calibrate, "_prefills", out_of_memory)


def measured(ranks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(type(shape), "tp_size", lambda _self, _s: ranks)
    scheduler: Any = SimpleNamespace(tp_cpu_group=None)
    store: Any = None
    return measure(scheduler, store, {}, 1)


@pytest.mark.usefixtures("fails")
def test_one_rank_serves_without_rates(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert measured(1, monkeypatch) is None
    assert "kv auto keeps everything" in caplog.text


@pytest.mark.usefixtures("fails")
def test_one_of_several_ranks_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in a collective of the model, and would wait for it until a time-out of an hour."""
    with pytest.raises(RuntimeError, match="out of memory"):
        measured(2, monkeypatch)
