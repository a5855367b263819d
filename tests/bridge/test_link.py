"""Engine and trainer of one mind: when weights are pushed, under which version, and when not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from sglang_april.client import AprilError
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.link import Link
from trainer_bridge.push.pusher import PushFailed


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

    def ready(self) -> None:
        self.started += 1

    def state(self) -> dict[str, Any]:
        runs = {name: {} for name in self.runs}
        return {"policy_version": self.version, "runs": runs, "closed": self.closed, "push_open": self.push_open}

    def get_round(self, round_id: str) -> None:
        if round_id not in self.rounds:
            raise AprilError(404, "round_id", "there is none")

    def connect(self, *_: Any) -> None:
        pass

    def push(self, version: int | None) -> Any:
        if self.failing:
            self.failing -= 1
            raise PushFailed("the weights were refused")
        assert version is None or version > self.version or (version == self.version and self.closed)
        self.pushes.append(version)
        self.version, self.closed = self.version + 1 if version is None else version, ""
        return SimpleNamespace(version=self.version)


def link(server: FakeServer, folder: Path, step: int = 0) -> tuple[Link, Any]:
    store = Checkpoints(folder, 1)
    store.run_name("r")
    rollouts: Any = SimpleNamespace(held=False)
    fake: Any = server
    made = Link(fake, fake, rollouts, store, "r", Config(hf_checkpoint="m", prompt_data="d"))
    made.step = step
    return made, rollouts


def find(made: Link) -> None:
    made.call(made.align, lambda _: None, at_once=False)


def test_a_new_run_pushes_once_and_then_once_a_step(tmp_path: Path) -> None:
    server = FakeServer()
    server.version = 6
    made, rollouts = link(server, tmp_path)
    find(made)
    assert (server.pushes, made.version) == ([None], 7)
    rollouts.held = True
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
    server.version, server.runs, server.closed = 3, {"r"}, "name the policy version first"
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

    with pytest.raises(httpx.ConnectError):
        made.call(lost, lambda _: None)


def test_what_the_engine_refuses_is_no_loss(tmp_path: Path) -> None:
    made, _ = link(FakeServer(), tmp_path)

    def refused() -> None:
        raise AprilError(400, "prompts", "too long")

    with pytest.raises(AprilError):
        made.call(refused, lambda _: None)
