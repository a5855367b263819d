"""Keeps the engines at the trainer's weights, also after an engine or the trainer was lost.

The policy version of the engines is `base_version` + completed steps. A push that repeats a step's weights under a
greater version raises the base from this step on. Engines ahead of the trainer are not pushed to:
the trainer has been restarted from a checkpoint and repeats rounds that they have already answered. Kept replies need
no weights, so this also works in the middle of a push, and after a restart or a release of memory that left the version
without weights.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from sglang_april.client import AprilClient, AprilError, RoundLostError, ServerLostError
from trainer_bridge.checkpoints import Checkpoints
from trainer_bridge.config import Config
from trainer_bridge.handshake import EngineUnreachableError, check_colocated
from trainer_bridge.push.pusher import PushFailed
from trainer_bridge.rollout import RolloutSource
from trainer_bridge.rollout_engine import RolloutEngines
from trainer_bridge.server_process import EngineGoneError, EngineLostError
from trainer_bridge.trainer import PARTS, Trainer

ATTEMPTS = 3
"""Attempts at a call during which the engine is lost."""
ENGINE_LOST = (
    httpx.TransportError,
    ServerLostError,
    RoundLostError,
    EngineLostError,
    EngineUnreachableError,
    PushFailed,
)
T = TypeVar("T")


class EngineSession:
    """Makes calls to the engines that survive the loss of an engine."""

    def __init__(
        self,
        engines: RolloutEngines,
        trainer: Trainer,
        rollouts: RolloutSource,
        store: Checkpoints,
        run: str,
        config: Config,
    ) -> None:
        self._engines, self._trainer, self._rollouts, self._store = engines, trainer, rollouts, store
        self._run, self._config = run, config
        self.step = 0
        """Steps that the trainer has completed."""
        self.reconnected = False
        """The engines may have drawn a part of the next round already, for an earlier process or before they were lost.
        The loop resets it."""
        self._synced_step: int | None = None
        """The step whose weights the engines are known to have."""
        self._knows_run = False
        """Whether every engine has had weights of this run."""

    @property
    def version(self) -> int:
        """The policy version of the trainer's weights."""
        return self._store.base_version(self.step) + self.step

    def call(self, function: Callable[[], T], warn: Callable[[str], None], *, reconnect_first: bool = False) -> T:
        """The value of `function`. If the engine is lost, reconnect, push the weights, and call it again.

        Raises: EngineGoneError: the engine cannot be recovered.
        """
        reconnect = reconnect_first
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                if reconnect:
                    self._offload_trainer()  # a server reserves the memory that is free when it starts
                    self._reconnect()
                    self.sync_weights()
                    self._offload_trainer()
                return function()
            except ENGINE_LOST as error:
                if not attempts_left:
                    raise EngineGoneError(f"the engine was lost {ATTEMPTS} times in one call: {error!r}") from error
                warn(f"the engine is lost ({error!r}); reconnecting")
                reconnect = True
        raise AssertionError("unreachable")

    def sync_weights(self) -> None:
        """Push, unless the engines have the weights of this step or of a later one of this run."""
        if self._synced_step == self.step:
            return
        states = [engine.client.state() for engine in self._engines.each]
        base, target = self._store.base_version(self.step), self.version
        versions = [int(state["policy_version"]) for state in states]
        unnamed = [bool(state["unnamed"]) for state in states]
        if not base or not self._knows_run or any(version < target for version in versions):
            self._push(target if base and all(map(target.__gt__, versions)) else None)
        elif all(name and version == target for name, version in zip(unnamed, versions, strict=True)):
            self._push(target)
        elif any(map(_needs_push, states)) and not self._next_round_is_answered():
            self._push(None)
        self._synced_step = self.step

    def _push(self, version: int | None) -> None:
        self._store.set_base_version(self.step, self._trainer.push(version).version - self.step)
        self._knows_run = True

    def _next_round_is_answered(self) -> bool:
        """Whether every engine has a reply to the next round."""
        try:
            next_round = f"{self._run}.{self.step + 1}"
            return all(engine.client.get_round(next_round) is not None for engine in self._engines.each)
        except AprilError as error:
            if error.status not in (404, 410):
                raise
            return False

    def _offload_trainer(self) -> None:
        """In a colocated run, offload the trainer until it is needed."""
        if self._config.offloads:
            self._trainer.offload(*PARTS)

    def _reconnect(self) -> None:
        """Wait for the engines, connect the trainer to them, and check what they have of the run."""
        self.reconnected = self._store.base_version(self.step) > 0  # a new run has had no round
        self._engines.wait_until_ready()
        if self._config.colocate:
            for engine in self._engines.each:
                check_colocated(engine.url, engine.client.state())
        engines = self._engines.each
        clients = [engine.client for engine in engines]
        self._trainer.connect([engine.url for engine in engines], self._config.transport, self._config.api_key)
        self._rollouts.engines_with_carry = {i for i, client in enumerate(clients) if self._has_carry(client)}
        self._knows_run = all(map(self._has_run, clients))
        self._synced_step = None

    def _has_carry(self, client: AprilClient) -> bool:
        """Whether an engine has the undelivered prompts of the last checkpoint, or has had them in the next round.

        An engine keeps a run without prompts, for example when `on_end: drop` has deleted them.
        """
        if self._config.agent is not None:  # an agent that still runs may have begun the run anew
            carries = _has_round(client, f"{self._run}.{self.step}")
        else:
            carries = bool(client.partials(self._run)["groups"])
        return carries or _has_round(client, f"{self._run}.{self.step + 1}")

    def _has_run(self, client: AprilClient) -> bool:
        """Whether an engine lists the run, or has the run's last or next round."""
        if self._run in client.state()["runs"]:
            return True
        return any(_has_round(client, f"{self._run}.{step}") for step in (self.step, self.step + 1))


def _has_round(client: AprilClient, round_id: str) -> bool:
    try:
        client.get_round(round_id)
    except AprilError as error:
        if error.status == 404:
            return False
        if error.status != 410:
            raise
    return True


def _needs_push(state: dict[str, Any]) -> bool:
    """Whether the engine refuses rounds until it gets weights: after half a push, or a restart from its journal."""
    return bool(state["push_open"] or state["failed"] or state["unnamed"])
