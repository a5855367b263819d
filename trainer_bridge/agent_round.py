"""The rounds of agents at the engine, one at a time, and the thread that takes the results of agents meanwhile."""

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from sglang_april.client import AprilClient, RolloutReply
from sglang_april.client.follow import follow
from sglang_april.client.types import RolloutSummary
from trainer_bridge.rollout_collector import ScoredRollout
from trainer_bridge.trajectory_samples import TrajectoryGroup

OPEN_POLL_S = 0.02
"""Seconds between two queries whether a round is open at the engine."""


@dataclass(slots=True, eq=False)
class AgentRound:
    """A round while it is open. Later errors wait in `events` for the next one."""

    id: str
    trains: bool = False
    """Groups that are given up or rejected are replaced by other prompts."""
    stops: bool = False
    """It has no quota, and is stopped when all agents have finished."""
    events: "queue.SimpleQueue[RolloutReply | BaseException]" = field(default_factory=queue.SimpleQueue)
    """The reply, or the error that ends it."""
    extensions: list[str] = field(default_factory=list)
    """Prompts that replaced others."""
    rejected: int = 0
    """Groups whose rewards are all equal, with `dynamic_sampling`."""
    given_up: int = 0
    """Groups whose agents failed."""
    problems: list[str] = field(default_factory=list)
    failed: bool = False
    """A result has raised an error. The agents of later ones will be abandoned, so they are not handled: with a lost
    engine, each would wait for it."""

    def open(self, client: AprilClient, body: dict[str, Any]) -> None:
        """Send the request in a separate thread, and wait until the round is open or has failed.

        No agent may begin before the engine has the round.
        """

        def reply() -> Iterator[RolloutReply]:
            yield client.rollout(**body)

        follow(reply(), self.events.put, "round")
        while self.events.empty():
            if any(row["round_id"] == self.id for row in client.state()["rounds"]):
                return
            time.sleep(OPEN_POLL_S)

    def scored(self, reply: RolloutReply) -> ScoredRollout:
        """What the round has delivered."""
        groups: dict[str, TrajectoryGroup] = {}
        for trajectory in reply.trajectories:
            prompt_id = trajectory.metadata["prompt"]
            groups.setdefault(prompt_id, TrajectoryGroup(prompt_id, [])).trajectories.append(trajectory)
        rows = reply.carried["trajectories"]
        carried = {
            "groups": len({row["group"] for row in rows}),
            "samples": len(rows),
            "tokens": sum(row["tokens"] for row in rows),
        }
        summary = RolloutSummary(
            reply.round_id, reply.run, reply.policy_version, reply.end_reason, [], carried, reply.stats
        )
        return ScoredRollout(
            summary,
            list(groups.values()),
            rejected=self.rejected,
            unscored=self.given_up,
            replaced=len(self.extensions),
            problems=self.problems,
        )


class AgentRounds:
    """The open round, and the thread on which results are handled. Its errors end the round, or the next one."""

    def __init__(self, client: AprilClient) -> None:
        self._client = client
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agent results")
        self.current = AgentRound("")
        """The open round, or one that receives errors in between."""

    def run(
        self, new: AgentRound, body: dict[str, Any], begin: Callable[[], None], clock: AbstractContextManager[Any]
    ) -> RolloutReply:
        """Open a round and wait for its reply. `begin` is called on the thread of the results when it is open.

        Args:
            clock: entered while the round is open.
        """
        new.open(self._client, body)

        def start() -> None:
            self._replace(new)
            begin()

        with clock:
            self.call(start)
            reply = new.events.get()
        self.call(lambda: self._replace(AgentRound("")))  # the pool does not change from here on
        if isinstance(reply, BaseException):
            raise reply
        return reply

    def call(self, call: Callable[[], None]) -> None:
        """Make a call on the thread of the results, and wait for it."""
        self._thread.submit(call).result()

    def handle(self, call: Callable[[], None]) -> None:
        """Make a call on the thread of the results, without waiting. From any thread."""
        with suppress(RuntimeError):  # after `close`
            self._thread.submit(self._handle, call)

    def raise_error(self) -> None:
        """Raise an error since the last round."""
        if not self.current.events.empty():
            error = self.current.events.get()
            assert isinstance(error, BaseException)
            self.current = AgentRound("")
            raise error

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _handle(self, call: Callable[[], None]) -> None:
        if self.current.failed:
            return
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self.current.failed = True
            self.current.events.put(error)

    def _replace(self, new: AgentRound) -> None:
        """The new round gets the errors that the main thread has not read yet."""
        while not self.current.events.empty():
            new.events.put(self.current.events.get())
        new.failed = self.current.failed
        self.current = new
