"""An unexpected exception of the plugin in a scheduler process ends the server with one sentence (`fail-stop`)."""

import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from sglang_april.adapter import fail_stop, hooking
from sglang_april.adapter.core import frontend, hooks_scheduler
from sglang_april.adapter.core.envelope import AprilOutput, AprilReq
from sglang_april.adapter.core.hook_table import HOOKS
from sglang_april.adapter.core.hooks_control import WeightsNotReadError, read_weights
from sglang_april.adapter.hook import Hook
from sglang_april.api import messages
from tests.unit.scripted_engine import service

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sglang_april.adapter.core"


class ServerEndedError(Exception):
    """Replaces the end of the process."""


def fails(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("reason")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BaseException]]:
    """(where, exception) of each end of the server; this process counts as the scheduler of rank 3."""
    ends: list[tuple[str, BaseException]] = []

    def end(where: str, error: BaseException) -> NoReturn:
        ends.append((where, error))
        raise ServerEndedError

    monkeypatch.setattr(fail_stop._Rank, "number", 3)
    monkeypatch.setattr(fail_stop, "end", end)
    return ends


@pytest.mark.parametrize("row", HOOKS, ids=lambda row: row.handler)
def test_exception_of_any_hook_ends_the_server(ended: list[Any], monkeypatch: pytest.MonkeyPatch, row: Hook) -> None:
    call = hooking._lazy(PACKAGE, row)
    monkeypatch.setattr(pkgutil, "resolve_name", lambda _: fails)
    with pytest.raises(ServerEndedError):
        call(lambda: None)
    ((where, error),) = ended
    assert (where, repr(error)) == (row.handler.split(":")[1], "RuntimeError('reason')")


def around(handler: Any, orig: Any) -> Any:
    row = Hook("around", "module:handler", ("path",), "why", "when")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", lambda _: handler)
        return hooking._lazy(PACKAGE, row)(orig, 1, option=2)


def test_exception_of_sglang_inside_a_hook_is_left_to_sglang(ended: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="reason"):
        around(lambda orig, *args, **kwargs: orig(*args, **kwargs), fails)
    assert not ended


def test_exception_of_a_hook_that_handles_one_of_sglang_ends_the_server(ended: list[Any]) -> None:
    def handler(orig: Any, *_args: Any, **_kwargs: Any) -> None:
        try:
            orig()
        except RuntimeError:
            raise ValueError from None

    with pytest.raises(ServerEndedError):
        around(handler, fails)
    assert isinstance(ended[0][1], ValueError)


def test_exception_of_another_function_of_sglang_ends_the_server(ended: list[Any]) -> None:
    """Functions that were hooked once have wrappers of one code."""

    def wrapped(function: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs)

    other = wrapped(fails)
    with pytest.raises(ServerEndedError):
        around(lambda *_args, **_kwargs: other(), wrapped(lambda: None))
    with pytest.raises(RuntimeError, match="reason"):
        around(lambda orig, *args, **kwargs: orig(*args, **kwargs), other)
    assert len(ended) == 1


def test_weights_that_cannot_be_read_are_no_internal_error(ended: list[Any]) -> None:
    """SGLang passes the exception on to the weight call, which is refused."""
    with pytest.raises(WeightsNotReadError, match="reason"):
        around(read_weights, fails)
    assert not ended


def test_exception_in_another_process_is_left_to_sglang() -> None:
    """The HTTP process refuses calls by ValueError."""
    with pytest.raises(RuntimeError, match="reason"):
        around(fails, None)


@pytest.mark.parametrize(
    "payload", [b"garbage", messages.encode(messages.Thaw(1)), messages.encode(messages.Moved([], {}))]
)
def test_exception_of_a_message_ends_the_server(ended: list[Any], payload: bytes) -> None:
    """One that cannot be decoded, a command and an observation that fail."""
    controller: Any = SimpleNamespace(command=fails, observe=fails)
    with pytest.raises(ServerEndedError):
        hooks_scheduler._receive_message(controller, AprilReq(payload=payload))
    assert ended[0][0] == "receive_message"


def test_weights_do_not_change_under_samples_that_could_not_be_suspended(ended: list[Any]) -> None:
    applied: list[Any] = []
    manager: Any = SimpleNamespace(scheduler=SimpleNamespace(april=SimpleNamespace(interrupt=fails)))
    row = next(row for row in HOOKS if row.handler == "hooks_control:weight_call")
    with pytest.raises(ServerEndedError):
        hooking._lazy(PACKAGE, row)(applied.append, manager, None)
    assert ended[0][0] == "weight_call"
    assert not applied


def test_exception_of_an_event_in_the_http_process_ends_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's loop there ends the server if a handler raises."""
    april, _ = service()
    with pytest.raises(msgspec.DecodeError):
        frontend._receive_event(april, AprilOutput(payload=b"garbage"))
    assert "the server ends, because the HTTP process raised ValidationError" in caplog.text


SERVER = """
    import multiprocessing, os, signal, sys, threading, time
    from sglang_april.adapter import fail_stop

    def fails():
        raise RuntimeError("reason")

    def scheduler():
        fail_stop.arm(3)
        threading.Thread(target=fails, name="other").start()
        where = sys.argv[1]
        if where == "thread":
            threading.Thread(target=fails, name="april-store").start()
            time.sleep(600)
        try:
            fail_stop.ends_server(fails)()
        except BaseException:  # SGLang may catch what a hook raises
            print("caught", flush=True)
        finally:
            print("unwound", flush=True)

    if __name__ == "__main__":
        asked = []
        signal.signal(signal.SIGQUIT, lambda *_: asked.append(True))
        process = multiprocessing.get_context("fork").Process(target=scheduler)
        process.start()
        process.join()
        print(asked, process.exitcode)
"""
"""A parent with SGLang's signal handler, and a scheduler in which the plugin fails."""


@pytest.mark.parametrize(("way", "where"), [("hook", "fails"), ("thread", "thread april-store")])
def test_process_ends_without_unwinding_and_signals_its_parent(tmp_path: Path, way: str, where: str) -> None:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    done = subprocess.run(
        [sys.executable, str(script), way], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.split("\n")[-2] == "[True] 1"
    assert "caught" not in done.stdout
    assert "unwound" not in done.stdout
    sentence = f"sglang-april: the server ends, because rank 3 raised RuntimeError('reason') in {where}."
    assert done.stderr.count(sentence) == 1
    assert "Traceback" in done.stderr
