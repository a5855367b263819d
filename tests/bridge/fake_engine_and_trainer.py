"""An engine session on an engine and a trainer that only count."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_april.client import AprilError
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.engine_session import EngineSession
from trainer_bridge.push.pusher import PushFailed


class FakeEngineAndTrainer:
    """Engine and trainer in one: a policy version, the runs and rounds at the engine, and the pushes to it."""

    url = "http://engine"

    def __init__(self) -> None:
        self.version, self.runs, self.rounds = 0, set[str](), set[str]()
        self.unnamed, self.push_open, self.failed, self.closed = False, False, "", ""
        self.gpus: list[str] = []
        self.others: Sequence[FakeEngineAndTrainer] = ()
        """Further engines of the run."""
        self.groups: list[str] = []
        """Undelivered prompts."""
        self.pushes: list[int | None] = []
        self.failing = 0
        self.connections = 0

    @property
    def client(self) -> "FakeEngineAndTrainer":
        return self

    @property
    def each(self) -> list["FakeEngineAndTrainer"]:
        return [self, *self.others]

    def wait_until_ready(self) -> None:
        self.connections += 1

    def state(self) -> dict[str, Any]:
        runs = {name: {} for name in self.runs}
        reasons = {"push_open": self.push_open, "failed": self.failed, "unnamed": self.unnamed, "closed": self.closed}
        http = {"model": {"memory_saver": False}}
        return {"policy_version": self.version, "runs": runs, "gpus": self.gpus, "http": http, **reasons}

    def partials(self, run: str) -> dict[str, Any]:
        return {"groups": [{"run": run, "id": name} for name in self.groups], "unstarted": [], "partials": []}

    def get_round(self, round_id: str) -> str:
        if round_id not in self.rounds:
            raise AprilError(404, "round_id", "there is none")
        return "its reply"

    def connect(self, *_: Any) -> None:
        pass

    def offload(self, *_parts: Any) -> None:
        pass

    def push(self, version: int | None) -> Any:
        if self.failing:
            self.failing -= 1
            raise PushFailed("the weights were refused")
        for engine in self.each:
            assert version is None or version > engine.version or (version == engine.version and engine.unnamed)
        self.pushes.append(version)
        pushed = max(engine.version for engine in self.each) + 1 if version is None else version
        for engine in self.each:
            engine.version, engine.unnamed, engine.push_open, engine.failed = pushed, False, False, ""
        return SimpleNamespace(version=self.version)


def make_session(
    server: FakeEngineAndTrainer, folder: Path, step: int = 0, rollouts: Any = None, others: Any = (), **fields: Any
) -> tuple[EngineSession, Any]:
    store = Checkpoints(folder, 1)
    store.run_name("r")
    rollouts = rollouts or SimpleNamespace(engines_with_carry=set())
    fake: Any = server
    server.others = others
    config = Config(hf_checkpoint="m", prompt_data="d", **fields)
    session = EngineSession(fake, fake, rollouts, store, "r", config)
    session.step = step
    return session, rollouts


def connect(session: EngineSession) -> None:
    session.call(session.sync_weights, lambda _: None, reconnect_first=True)
