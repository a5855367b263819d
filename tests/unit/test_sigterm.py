"""SIGTERM and Ctrl-C in the HTTP process: storing has a part of the time limit; the limit or a second one ends all."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import ShutdownReq

from sglang_april.adapter.core import shutdown
from sglang_april.config import AprilConfig
from sglang_april.interrupt import what_is_kept


async def forever(*_: Any) -> None:
    await asyncio.Event().wait()


async def at_once(*_: Any) -> None: ...


class FakeManager:
    """A manager and its schedulers, which end by `ShutdownReq` unless they hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Callable[..., Awaitable[None]], limit: float) -> None:
        self.schedulers, self.hangs, self.statuses = ["scheduler"], False, list[int]()
        self.ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def end(status: int) -> None:
            self.statuses.append(status)
            loop.call_soon_threadsafe(self.ended.set)

        monkeypatch.setattr(shutdown, "shut_down", store)
        monkeypatch.setattr(shutdown, "collect_scheduler_processes", lambda: self.schedulers)
        monkeypatch.setattr(shutdown, "_end", end)
        self.manager = SimpleNamespace(
            april=SimpleNamespace(
                config=SimpleNamespace(shutdown_s=limit), restored_state=SimpleNamespace(fault=""), state=self._state
            ),
            gracefully_exit=False,
            model_update_lock=SimpleNamespace(stock=0),
            _subprocess_watchdog=None,
            _dispatch_to_scheduler=self._dispatch,
        )
        self.shutdown = shutdown.ShutdownHandler(self.manager)

    async def _state(self) -> dict[str, Any]:
        return {"journal": {"waiting": 7}}

    def _dispatch(self, message: Any) -> None:
        assert isinstance(message, ShutdownReq)
        if not self.hangs:
            self.schedulers.clear()


@pytest.mark.parametrize(
    ("store", "limit", "hangs", "status"),
    [(at_once, 600.0, False, 0), (forever, 600.0, False, 0), (at_once, 0.1, True, 1)],
    ids=["in order", "storing takes too long", "a scheduler hangs"],
)
def test_the_server_ends_within_the_limit(
    monkeypatch: pytest.MonkeyPatch, store: Callable[..., Awaitable[None]], limit: float, hangs: bool, status: int
) -> None:
    async def story() -> None:
        monkeypatch.setattr(shutdown, "STORING", 1e-4)
        server = FakeManager(monkeypatch, store, limit)
        server.hangs = hangs
        server.shutdown.signalled()
        assert server.manager.gracefully_exit, "/health answers 503"
        await server.ended.wait()
        assert server.statuses[0] == status

    asyncio.run(story())


FULL = "the journal cannot be written: the disk is full"


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [(FULL, FULL, f"{FULL}; 7 batches of records are lost"), ("", FULL, f"{FULL}; records are lost"), (FULL, "", "")],
)
def test_a_journal_that_cannot_be_written_is_no_success(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: str, after: str, line: str
) -> None:
    """The schedulers may write it as they end, or find only then that they cannot: the number is not known then."""

    async def story() -> None:
        monkeypatch.setattr(shutdown, "STORING", 1e-4)
        server = FakeManager(monkeypatch, forever, 600.0)
        server.manager.april.restored_state.fault = before
        dispatch = server.manager._dispatch_to_scheduler

        def end(message: Any) -> None:
            dispatch(message)
            server.manager.april.restored_state.fault = after

        server.manager._dispatch_to_scheduler = end
        server.shutdown.signalled()
        await server.ended.wait()
        assert server.statuses[0] == (1 if after else 0)

    asyncio.run(story())
    assert line in caplog.text
    assert ("are lost" in caplog.text) is bool(line)


def test_a_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        server = FakeManager(monkeypatch, forever, 600.0)
        server.shutdown.signalled()
        server.shutdown.signalled()
        assert server.statuses == [1]

    asyncio.run(story())


def test_requests_of_sglang_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        server = FakeManager(monkeypatch, at_once, 600.0)
        server.manager.model_update_lock.stock = 1
        server.shutdown.signalled()
        await asyncio.sleep(0.1)
        assert server.schedulers
        assert not server.statuses
        server.manager.model_update_lock.stock = 0
        await server.ended.wait()
        assert server.statuses[0] == 0

    asyncio.run(story())


def test_ctrl_c_stores_does_not_wait_for_requests_of_sglang_and_ends_with_its_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        stored: list[Any] = []

        async def store(april: Any) -> None:
            stored.append(april)

        server = FakeManager(monkeypatch, store, 600.0)
        server.manager.model_update_lock.stock = 1
        server.shutdown.interrupted()
        await server.ended.wait()
        assert stored
        assert server.statuses[0] == 130

    asyncio.run(story())


@pytest.mark.parametrize("first", ["signalled", "interrupted"])
def test_ctrl_c_during_a_shutdown_ends_at_once(monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    async def story() -> None:
        server = FakeManager(monkeypatch, forever, 600.0)
        getattr(server.shutdown, first)()
        server.shutdown.interrupted()
        assert server.statuses == [130]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "Nothing is kept; with --april-journal FILE, the same command would continue all runs."),
        ({"journal": "/j"}, "The journal /j keeps all runs; the same command continues them."),
        (
            {"journal": "/j", "disk_dir": "/d", "disk_gb": 1.0},
            "The journal /j keeps all runs, and /d the KV that was stored in time; the same command continues them.",
        ),
    ],
)
def test_what_is_kept(settings: dict[str, Any], sentence: str) -> None:
    assert what_is_kept(AprilConfig(**settings)) == sentence
