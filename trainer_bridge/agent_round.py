"""One round of agents: its request to the engine, and what happens to it until its reply."""

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang_april.client import AprilClient, RolloutReply
from sglang_april.client.follow import follow

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
