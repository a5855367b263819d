"""Engine and trainer of one mind: the engine has the weights of the trainer's step, also after either was lost.

The policy version at the engine is `base_version` + steps done. An engine ahead of its trainer is left alone: the
trainer has gone back to a checkpoint and asks for rounds again that it had asked for before. Answered rounds need no
weights, so this holds even in the middle of a push, or after a restart that left the version unnamed.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from sglang_april.client import AprilClient, AprilError
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.handshake import NoEngineError
from trainer_bridge.push.pusher import PushFailed
from trainer_bridge.rollout import RolloutDriver
from trainer_bridge.rollout_engine import RolloutEngines
from trainer_bridge.server_process import EngineGoneError, EngineLostError
from trainer_bridge.trainer import PARTS, Trainer

TRIES = 3
"""How often one call may find the engine gone."""
LOST = (httpx.TransportError, EngineLostError, NoEngineError, PushFailed)
T = TypeVar("T")


class EngineSession:
    """Calls to the engine that survive its loss. `step` is the trainer's: steps done."""

    def __init__(
        self,
        engines: RolloutEngines,
        trainer: Trainer,
        rollouts: RolloutDriver,
        store: Checkpoints,
        run: str,
        config: Config,
    ) -> None:
        self._engines, self._trainer, self._rollouts, self._store = engines, trainer, rollouts, store
        self._run, self._config = run, config
        self.step = 0
        self._aligned: int | None = None
        """The step whose weights the engine is known to have."""

    @property
    def version(self) -> int:
        """The policy version of the trainer's weights."""
        return self._store.base_version + self.step

    def call(self, do: Callable[[], T], warn: Callable[[str], None], *, at_once: bool = True) -> T:
        """The call's value; a lost engine is found again, has its weights pushed, and is asked again.

        Raises `EngineGoneError` where it stays lost.
        """
        for left in reversed(range(TRIES)):
            try:
                if not at_once:
                    self._make_room()  # a server that starts takes what memory it finds
                    self._find()
                    self.align()
                    self._make_room()
                return do()
            except LOST as error:
                if not left:
                    raise EngineGoneError(f"the engine was lost {TRIES} times in one call: {error!r}") from error
                warn(f"the engine is lost ({error!r}); looking for it")
                at_once = False
        raise AssertionError("unreachable")

    def align(self) -> None:
        """The engine has this step's weights, or later ones of this run."""
        if self._aligned == self.step:
            return
        states, base, target = [e.client.state() for e in self._engines.each], self._store.base_version, self.version
        versions, closed = [int(state["policy_version"]) for state in states], any(map(_needs_push, states))
        unnamed = ["name the version" in state["closed"] for state in states]
        held = len(self._rollouts.held) == len(states)
        if not base or not held or any(version < target for version in versions):
            self._push(target if base and all(map(target.__gt__, versions)) else None)
        elif all(name and version == target for name, version in zip(unnamed, versions, strict=True)):
            self._push(target)
        elif closed and not self._answered():
            self._push(None)
        self._aligned = self.step

    def _push(self, version: int | None) -> None:
        self._store.set_base_version(self._trainer.push(version).version - self.step)

    def _answered(self) -> bool:
        """Whether all engines have their replies of the round that will be asked for next."""
        try:
            following = f"{self._run}.{self.step + 1}"
            return all(engine.client.get_round(following) is not None for engine in self._engines.each)
        except AprilError as error:
            if error.status not in (404, 410):
                raise
            return False

    def _make_room(self) -> None:
        """Colocated: all of the trainer's memory, until it is needed."""
        if self._config.offloads:
            self._trainer.offload(*PARTS)

    def _find(self) -> None:
        """Find the engine (again): does it serve, is it ours, does it know the run."""
        self._engines.ready()
        each = self._engines.each
        self._trainer.connect([engine.url for engine in each], self._config.push, self._config.api_key)
        self._rollouts.held = {number for number, engine in enumerate(each) if self._known(engine.client)}
        self._aligned = None

    def _known(self, client: AprilClient) -> bool:
        """Whether an engine has the run's carry: it names the run, or knows its last round or the next."""
        if self._run in client.state()["runs"]:
            return True
        return any(_knows(client, f"{self._run}.{step}") for step in (self.step, self.step + 1))


def _knows(client: AprilClient, round_id: str) -> bool:
    try:
        client.get_round(round_id)
    except AprilError as error:
        if error.status == 404:
            return False
        if error.status != 410:
            raise
    return True


def _needs_push(state: dict[str, Any]) -> bool:
    """Whether the engine refuses rounds until it gets weights: half a push, or a restart from its journal."""
    return bool(state["push_open"]) or (bool(state["closed"]) and not state["closed"].startswith("memory is released"))
