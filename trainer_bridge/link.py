"""Engine and trainer of one mind: the engine has the weights of the trainer's step, also after either was lost.

The policy version at the engine is `base_version` + steps done. An engine ahead of its trainer is left alone: the
trainer has gone back to a checkpoint and asks for rounds again that it had asked for before.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from sglang_april.client import AprilError
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.engine import Engine, EngineLostError
from trainer_bridge.push.pusher import PushFailed
from trainer_bridge.rollout import Rollouts
from trainer_bridge.trainer import Trainer

TRIES = 3
"""How often one call may find the engine gone."""
LOST = (httpx.TransportError, EngineLostError, PushFailed)
T = TypeVar("T")


class Link:
    """Calls to the engine that survive its loss. `step` is the trainer's: steps done."""

    def __init__(
        self, engine: Engine, trainer: Trainer, rollouts: Rollouts, store: Checkpoints, run: str, config: Config
    ) -> None:
        self._engine, self._trainer, self._rollouts, self._store = engine, trainer, rollouts, store
        self._run, self._config = run, config
        self.step = 0
        self._aligned: int | None = None
        """The step whose weights the engine is known to have."""

    @property
    def version(self) -> int:
        """The policy version of the trainer's weights."""
        return self._store.base_version + self.step

    def call(self, do: Callable[[], T], warn: Callable[[str], None], *, at_once: bool = True) -> T:
        """The call's value; a lost engine is found again, has its weights pushed, and is asked again."""
        for left in reversed(range(TRIES)):
            try:
                if not at_once:
                    self._find()
                    self.align()
                return do()
            except LOST as error:
                if not left:
                    raise
                warn(f"the engine is lost ({error!r}); looking for it")
                at_once = False
        raise AssertionError("unreachable")

    def align(self) -> None:
        """The engine has this step's weights, or later ones of this run."""
        if self._aligned == self.step:
            return
        state, base, target = self._engine.client.state(), self._store.base_version, self.version
        now, closed = int(state["policy_version"]), _needs_push(state)
        if not base or now < target or closed or not self._rollouts.held:
            named = target if base and (now < target or (now == target and closed)) else None
            self._store.set_base_version(self._trainer.push(named).version - self.step)
        self._aligned = self.step

    def _find(self) -> None:
        """Find the engine (again): does it serve, is it ours, does it know the run."""
        self._engine.ready()
        self._trainer.connect([self._engine.url], self._config.push, self._config.api_key)
        self._rollouts.held, self._aligned = self._known(), None

    def _known(self) -> bool:
        """Whether the engine has the run's carry: it names the run, or knows its last round or the next."""
        if self._run in self._engine.client.state()["runs"]:
            return True
        return any(self._knows(f"{self._run}.{step}") for step in (self.step, self.step + 1))

    def _knows(self, round_id: str) -> bool:
        try:
            self._engine.client.get_round(round_id)
        except AprilError as error:
            if error.status == 404:
                return False
            if error.status != 410:
                raise
        return True


def _needs_push(state: dict[str, Any]) -> bool:
    """Whether the engine refuses rounds until it gets weights: half a push, or a restart from its journal."""
    return bool(state["push_open"]) or (bool(state["closed"]) and not state["closed"].startswith("memory is released"))
