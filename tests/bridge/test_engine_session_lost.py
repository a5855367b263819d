"""What the engine session does when an engine, or a round, is lost."""

from pathlib import Path

import httpx
import pytest

from sglang_april.client import AprilError, RoundLostError, ServerLostError
from tests.bridge.fake_engine_and_trainer import FakeEngineAndTrainer, connect, make_session
from trainer_bridge.server_process import EngineGoneError


@pytest.mark.parametrize(
    "error", [ServerLostError(0, "server", "reset"), RoundLostError(404, "round_id", "there is no round r.1: lost")]
)
def test_after_a_loss_the_weights_are_pushed_and_the_call_is_repeated(tmp_path: Path, error: AprilError) -> None:
    """An external server that was restarted without a journal has neither the round nor the weights."""
    server, losses = FakeEngineAndTrainer(), [error]
    session, _ = make_session(server, tmp_path)

    def collect() -> str:
        if losses:
            raise losses.pop()
        return "collected"

    assert session.call(collect, lambda _: None) == "collected"
    assert (server.connections, server.pushes) == (1, [None])


def test_failed_push_is_repeated_after_reconnecting(tmp_path: Path) -> None:
    server, warnings = FakeEngineAndTrainer(), list[str]()
    server.failing = 1
    session, _ = make_session(server, tmp_path)
    session.call(session.sync_weights, warnings.append)
    assert (server.version, len(warnings), server.connections) == (1, 1, 1)


def test_engine_that_is_lost_repeatedly_ends_the_run(tmp_path: Path) -> None:
    session, _ = make_session(FakeEngineAndTrainer(), tmp_path)

    def lost() -> None:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineGoneError, match="3 times in one call: ConnectError"):
        session.call(lost, lambda _: None)


def test_engine_that_does_not_become_ready_is_not_waited_for_again(tmp_path: Path) -> None:
    server = FakeEngineAndTrainer()
    session, _ = make_session(server, tmp_path)
    waits: list[int] = []

    def never() -> None:
        waits.append(1)
        raise EngineGoneError("not ready")

    server.wait_until_ready = never  # type: ignore[method-assign]
    with pytest.raises(EngineGoneError, match="not ready"):
        connect(session)
    assert waits == [1]


def test_refusal_is_not_treated_as_a_lost_engine(tmp_path: Path) -> None:
    session, _ = make_session(FakeEngineAndTrainer(), tmp_path)

    def refused() -> None:
        raise AprilError(400, "prompts", "too long")

    with pytest.raises(AprilError):
        session.call(refused, lambda _: None)
