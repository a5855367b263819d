"""An exception of the plugin ends its rounds with an error; SGLang keeps serving (`contained-faults`)."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import AbortReq, UpdateWeightFromDiskReqInput

from sglang_april.adapter.v0_5_17 import hooks_control, hooks_scheduler
from sglang_april.adapter.v0_5_17.hooks_scheduler import Process
from sglang_april.api import messages
from sglang_april.scheduler.controller import Controller
from tests.unit.controller_harness import given_as
from tests.unit.fake_engine import FakeEngine
from tests.unit.http_app import client_of, open_round, run
from tests.unit.scripted_engine import ScriptedEngine, prompt, service

REASON = "rounds are over until a restart: internal error in before_step: RuntimeError('reason')"


def fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("reason")


class Scheduler(SimpleNamespace):
    """The parts of a scheduler that the hooks use; `stock` records calls of SGLang's own functions."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.sent: list[messages.Event] = []
        self.engine.on_event = self.sent.append
        self.stock_calls: list[tuple[Any, ...]] = []
        super().__init__(
            april=self.engine.controller,
            flush_wrapper=SimpleNamespace(_pending=None),
            is_fully_idle=lambda: True,
        )

    def stock(self, *args: Any, **kwargs: Any) -> Any:
        self.stock_calls.append((args, kwargs))
        return SimpleNamespace(batch_to_run=None, success=True, message="")

    @property
    def broken(self) -> list[str]:
        """Reasons reported to the HTTP process."""
        return [event.reason for event in self.sent if isinstance(event, messages.Broken)]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Exceptions of the plugin do not end the process, unlike in the live tests."""
    scheduler = Scheduler()
    monkeypatch.setattr(hooks_scheduler, "CHECK", False)
    monkeypatch.setattr(Process, "controller", scheduler.april)
    monkeypatch.setattr(Process, "engine", SimpleNamespace(_renew=fails))
    monkeypatch.setattr(Process, "scheduler", scheduler)
    return scheduler


def step(s: Scheduler) -> Any:
    return hooks_scheduler.next_batch(s.stock, s, None, None)


def change_weights(s: Scheduler) -> Any:
    manager = SimpleNamespace(scheduler=s, is_fully_idle=s.is_fully_idle)
    return hooks_control.weight_call(s.stock, manager, UpdateWeightFromDiskReqInput(model_path="x"))


def test_the_first_error_is_reported_once(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "before_step", fails)
    monkeypatch.setattr(Controller, "progress", fails)
    step(scheduler)
    step(scheduler)
    hooks_scheduler.count_finishes(None, scheduler, SimpleNamespace(), None)
    assert len(scheduler.stock_calls) == 2
    assert scheduler.broken == [REASON]
    assert scheduler.april.context.closed() == REASON


def test_later_commands_are_refused_at_once(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Controller, "before_step", fails)
    step(scheduler)
    given, params = given_as({"p": (3, 1, 4)})
    scheduler.april.command(messages.OpenRound(1, messages.RoundSpec("r", "run", 1, "group", "keep", 5), given, params))
    assert scheduler.sent[-1] == messages.Answer(1, 503, "", REASON)


ADOPTED = SimpleNamespace(april=object())
CALLS: dict[str, Callable[[Scheduler], Any]] = {
    "on_queued": lambda s: hooks_scheduler.renew_cache_key(s.stock, s, SimpleNamespace(kv=None, april=None)),
    "aborted": lambda s: hooks_scheduler.intercept_queue_abort(s.stock, None, AbortReq(rid="r"), ADOPTED),
    "thaw": lambda s: hooks_control.thaw(None, s, None),
    "freeze": lambda s: hooks_control.pause(s.stock, s, None),
    "evacuate": lambda s: hooks_control.flush(s.stock, s),
    "interrupt": change_weights,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_exception_of_the_plugin_ends_the_scheduler(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Controller, "aborted", fails)
    scheduler.april.pushes = SimpleNamespace(thaw=fails, freeze=fails, interrupt=fails)
    scheduler.april.suspender = SimpleNamespace(evacuate=fails)
    CALLS[name](scheduler)
    assert scheduler.broken == [REASON.replace("before_step", name)]


def test_weights_do_not_change_under_samples_that_could_not_be_suspended(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert change_weights(scheduler).success
    scheduler.stock_calls.clear()
    monkeypatch.setattr(scheduler.april.pushes, "interrupt", fails)
    for _ in range(2):
        refused = change_weights(scheduler)
        assert not refused.success
        assert "internal error in interrupt" in refused.message
    assert not scheduler.stock_calls


def broken_while(engine: ScriptedEngine, *, late: bool) -> None:
    """The scheduler fails; `late`: the answer to its last opened round was waiting for the journal."""
    engine.tell(messages.Broken(REASON))
    if late:
        engine.tell(messages.Answer(engine.opened.seq, data={"policy_version": 0}))


@pytest.mark.parametrize("late", [False, True])
def test_waiting_clients_get_the_error(late: bool) -> None:
    """Weight calls do not wait for a failed round either."""

    async def scenario() -> None:
        april, engine = service()
        async with client_of(april) as client:
            stream = await open_round(client, engine, run="b", round_id="s", stream=True, prompts=[prompt(id="b")])
            if late:
                engine.silent.add(messages.OpenRound)
            waiting = await open_round(client, engine, run="a", round_id="w", prompts=[prompt(id="a")])
            broken_while(engine, late=late)
            response = await waiting
            assert (response.status_code, response.json()["error"]) == (500, {"field": "server", "reason": REASON})
            assert REASON in (await stream).text
            asked = len(engine.commands)
            refused = await client.post("/april/rollout", json={"run": "c", "prompts": [prompt(id="c")]})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (503, REASON)
            assert len(engine.commands) == asked
            await asyncio.wait_for(april.engine.lock.acquire_writer(), 5)

    run(scenario())
