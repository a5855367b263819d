"""Engine and trainer of one mind: when weights are pushed, under which version, and when not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglang_april.client import AprilError
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.engine_session import EngineSession
from trainer_bridge.push.pusher import PushFailed
from trainer_bridge.server_process import EngineGoneError

UNNAMED = "the journal is at policy version 3: name the version by --april-version or by a push"


class FakeServer:
    """A policy version, the runs it knows, and whether it wants weights."""

    url = "http://engine"

    def __init__(self) -> None:
        self.version, self.runs, self.rounds, self.closed, self.push_open = 0, set[str](), set[str](), "", False
        self.pushes: list[int | None] = []
        self.failing = 0
        self.started = 0

    @property
    def client(self) -> "FakeServer":
        return self

    @property
    def each(self) -> list["FakeServer"]:
        return [self]

    def ready(self) -> None:
        self.started += 1

    def state(self) -> dict[str, Any]:
        runs = {name: {} for name in self.runs}
        return {"policy_version": self.version, "runs": runs, "closed": self.closed, "push_open": self.push_open}

    def get_round(self, round_id: str) -> str:
        if round_id not in self.rounds:
            raise AprilError(404, "round_id", "there is none")
        return "its reply"

    def connect(self, *_: Any) -> None:
        pass

    def push(self, version: int | None) -> Any:
        if self.failing:
            self.failing -= 1
            raise PushFailed("the weights were refused")
        unnamed = "name the version" in self.closed
        assert version is None or version > self.version or (version == self.version and unnamed)
        self.pushes.append(version)
        self.version, self.closed, self.push_open = self.version + 1 if version is None else version, "", False
        return SimpleNamespace(version=self.version)


def link(server: FakeServer, folder: Path, step: int = 0) -> tuple[EngineSession, Any]:
    store = Checkpoints(folder, 1)
    store.run_name("r")
    rollouts: Any = SimpleNamespace(held=set())
    fake: Any = server
    made = EngineSession(fake, fake, rollouts, store, "r", Config(hf_checkpoint="m", prompt_data="d"))
    made.step = step
    return made, rollouts


def find(made: EngineSession) -> None:
    made.call(made.align, lambda _: None, at_once=False)


def test_a_new_run_pushes_once_and_then_once_a_step(tmp_path: Path) -> None:
    server = FakeServer()
    server.version = 6
    made, rollouts = link(server, tmp_path)
    find(made)
    assert (server.pushes, made.version) == ([None], 7)
    rollouts.held = {0}
    made.step = 1
    made.align()
    made.align()
    assert (server.pushes, server.version) == ([None, 8], 8)


def test_a_trainer_that_went_back_leaves_its_engine_alone(tmp_path: Path) -> None:
    server = FakeServer()
    made, rollouts = link(server, tmp_path)
    find(made)
    server.version, server.runs = 4, {"r"}
    again, rollouts = link(server, tmp_path, step=1)
    find(again)
    assert rollouts.held
    assert (server.pushes, again.version) == ([None], 2)
    for step in (2, 3):
        again.step = step
        again.align()
    assert server.pushes == [None]
    again.step = 4
    again.align()
    assert server.pushes == [None, 5]


def test_a_new_engine_gets_this_steps_weights_under_their_version(tmp_path: Path) -> None:
    made, _ = link(FakeServer(), tmp_path)
    find(made)
    server = FakeServer()
    again, rollouts = link(server, tmp_path, step=5)
    find(again)
    assert not rollouts.held
    assert (server.pushes, again.version) == ([6], 6)


def test_another_engine_that_is_further_counts_on_from_its_own_version(tmp_path: Path) -> None:
    made, _ = link(FakeServer(), tmp_path)
    find(made)
    server = FakeServer()
    server.version = 40
    again, _ = link(server, tmp_path, step=5)
    find(again)
    assert (server.pushes, again.version) == ([None], 41)


def test_an_engine_back_from_its_journal_is_named_its_version(tmp_path: Path) -> None:
    made, _ = link(FakeServer(), tmp_path)
    find(made)
    server = FakeServer()
    server.version, server.runs, server.closed = 3, {"r"}, UNNAMED
    again, rollouts = link(server, tmp_path, step=2)
    find(again)
    assert rollouts.held
    assert (server.pushes, again.version) == ([3], 3)


def test_the_reply_of_a_round_shows_that_the_engine_knows_the_run(tmp_path: Path) -> None:
    server = FakeServer()
    server.rounds = {"r.3"}
    made, rollouts = link(server, tmp_path, step=2)
    find(made)
    assert rollouts.held


def test_a_failed_push_is_healed_by_the_next(tmp_path: Path) -> None:
    server, said = FakeServer(), list[str]()
    server.failing = 1
    made, _ = link(server, tmp_path)
    made.call(made.align, said.append)
    assert (server.version, len(said), server.started) == (1, 1, 1)


def test_an_engine_that_never_comes_back_ends_the_run(tmp_path: Path) -> None:
    made, _ = link(FakeServer(), tmp_path)

    def lost() -> None:
        raise httpx.ConnectError("refused")

    with pytest.raises(EngineGoneError, match="3 times in one call: ConnectError"):
        made.call(lost, lambda _: None)


def test_an_engine_that_does_not_come_back_in_time_is_not_looked_for_again(tmp_path: Path) -> None:
    server = FakeServer()
    made, _ = link(server, tmp_path)
    looked: list[int] = []

    def never() -> None:
        looked.append(1)
        raise EngineGoneError("does not serve")

    server.ready = never  # type: ignore[method-assign]
    with pytest.raises(EngineGoneError, match="does not serve"):
        find(made)
    assert looked == [1]


def test_a_trainer_killed_in_its_push_asks_for_the_round_again_before_it_pushes(tmp_path: Path) -> None:
    """The weights at the engine are mixed, its version cannot be named again, and the reply needs neither."""
    server = FakeServer()
    made, _ = link(server, tmp_path)
    find(made)
    server.version, server.runs, server.push_open, server.closed = 3, {"r"}, True, "a push is open"
    server.rounds = {"r.3"}
    again, _ = link(server, tmp_path, step=2)
    find(again)
    assert (server.pushes, again.version) == ([None], 3), "nothing is pushed yet"
    again.step = 3
    again.align()
    assert (server.pushes, server.version) == ([None, 4], 4)


def test_a_push_that_nobody_ended_is_healed_where_the_next_round_is_not_answered(tmp_path: Path) -> None:
    server = FakeServer()
    made, _ = link(server, tmp_path)
    find(made)
    server.version, server.runs, server.push_open, server.closed = 3, {"r"}, True, "a push is open"
    again, _ = link(server, tmp_path, step=2)
    find(again)
    assert (server.pushes, again.version, server.version) == ([None, None], 4, 4)


def test_both_killed_the_engine_ahead_and_unnamed_answers_first(tmp_path: Path) -> None:
    server = FakeServer()
    made, _ = link(server, tmp_path)
    find(made)
    server.version, server.runs, server.closed, server.rounds = 3, {"r"}, UNNAMED, {"r.2"}
    again, _ = link(server, tmp_path, step=1)
    find(again)
    assert (server.pushes, again.version) == ([None], 2)
    again.step = 2
    again.align()
    assert (server.pushes[-1], again.version, server.closed) == (3, 3, "")


def test_what_the_engine_refuses_is_no_loss(tmp_path: Path) -> None:
    made, _ = link(FakeServer(), tmp_path)

    def refused() -> None:
        raise AprilError(400, "prompts", "too long")

    with pytest.raises(AprilError):
        made.call(refused, lambda _: None)
