"""Agents and an engine in memory, for rounds of trajectories."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from sglang_april.client import AprilError, RecordedTrajectory, RolloutReply, ServerLostError
from trainer_bridge.agent_rollout import AgentRollouts
from trainer_bridge.agents import AgentFinished, StartAgent
from trainer_bridge.rollout_collector import ScoredRollout

Outcome = Callable[[StartAgent], float | str | None]
"""The reward of a trajectory, why it has none, or None: it does not end."""


class FakeRunner:
    """Ends each trajectory at once, with the result of `outcome`."""

    outcome: Outcome

    def __init__(self, *arguments: Any) -> None:
        self.finished = arguments[-1]
        self.started: list[StartAgent] = []
        self.cancelled: list[str] = []

    def start(self, run: str, start: StartAgent) -> None:
        assert start.headers["x-april-run"] == run
        self.started.append(start)
        outcome = type(self).outcome(start)
        if isinstance(outcome, str):
            self.finished(AgentFinished(start.id, None, outcome))
        elif outcome is not None:
            self.finished(AgentFinished(start.id, outcome))

    def cancel(self, ids: Any) -> list[str]:
        self.cancelled += (names := list(ids))
        return names

    def clock(self, run: str) -> Any:
        return nullcontext()

    def close(self) -> None:
        pass


def runner(rollouts: AgentRollouts) -> FakeRunner:
    return rollouts._runner  # type: ignore[return-value]


def started(rollouts: AgentRollouts) -> list[str]:
    """Ids of tasks, as `e0-2.1`: prompt and index."""
    return [start.task.id for start in runner(rollouts).started]


def end_agents(rollouts: AgentRollouts, prompt: str, reward: float | None, problem: str = "") -> None:
    """End all agents of a prompt that have been started."""
    for start in [start for start in runner(rollouts).started if start.task.id.startswith(f"{prompt}.")]:
        runner(rollouts).finished(AgentFinished(start.id, reward, problem))


def delivered(rollout: ScoredRollout) -> list[tuple[str, list[float | None]]]:
    """Prompts and rewards of the delivered groups."""
    return [(group.prompt_id, [t.reward for t in group.trajectories]) for group in rollout.groups]  # type: ignore[attr-defined]


class FakeAgentEngine:
    """Counts groups whose `n` trajectories are done, and delivers them in that order."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.done_: dict[str, dict[str, Any]] = {}
        self.rejected: list[str] = []
        self.dropped: list[str] = []
        self.unknown: set[str] = set()
        """Trajectories that made no request."""
        self.tokens: dict[str, int] = {}
        """Drawn so far, by trajectory."""
        self.lost_reject: str | None = None
        """A trajectory whose run it does not know when it is rejected, because it was restarted without a journal."""
        self.released = threading.Event()
        """While not set, a reject gets no answer, as during a weight call."""
        self.released.set()
        self.rejecting = threading.Event()
        self.lost = False
        self.open: dict[str, Any] | None = None
        self.answered: dict[str, RolloutReply] = {}
        self.stopped = False
        self._changed = threading.Condition()

    def rollout(self, **body: Any) -> RolloutReply:
        with self._changed:
            self.bodies.append(body)
            self.open, self.stopped = body, False
            self._changed.wait_for(lambda: self.lost or self.stopped or self._is_met(body), 60)
            self.open = None
            if self.lost:
                raise ServerLostError(0, "server", "lost")
            units = self._units(body)
            taken = [name for unit in units[: body["quota"] or len(units)] for name in unit]
            records = [
                RecordedTrajectory(
                    name, body["run"], "", self.done_[name]["reward"], self.done_[name]["metadata"], [], []
                )
                for name in taken
            ]
            for name in taken:
                del self.done_[name]
            carried = [{"group": name, "id": name, "tokens": 5, "state": "done"} for name in self.done_]
            return RolloutReply(body["round_id"], body["run"], 1, "quota", {"trajectories": carried}, {}, [], records)

    def _units(self, body: dict[str, Any]) -> list[list[str]]:
        if body["quota_unit"] == "trajectory":
            return [[name] for name in self.done_]
        prompts = Counter(end["metadata"]["prompt"] for end in self.done_.values())
        return [
            [name for name, end in self.done_.items() if end["metadata"]["prompt"] == prompt]
            for prompt, count in prompts.items()
            if count == body["n"]
        ]

    def _is_met(self, body: dict[str, Any]) -> bool:
        return body["quota"] is not None and len(self._units(body)) >= body["quota"]

    @contextmanager
    def change(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def done(self, run: str, trajectories: dict[str, Any] | None = None, reject: list[str] | None = None) -> None:
        if reject:
            self.rejecting.set()
            self.released.wait(60)
        with self.change():
            if self.lost:
                raise ServerLostError(0, "server", "lost")
            if self.unknown & (trajectories or {}).keys() or self.lost_reject in (reject or []):
                raise AprilError(404, "trajectories", "unknown")
            self.done_ |= trajectories or {}
            self.rejected += reject or []

    def raise_lost(self) -> None:
        raise ServerLostError(0, "server", "lost")

    def trajectory(self, name: str, run: str) -> RecordedTrajectory:
        if name in self.unknown:
            raise AprilError(404, "id", "unknown")
        return RecordedTrajectory(name, run, "", None, None, [], [], tokens=self.tokens.get(name, 0))

    def state(self) -> dict[str, Any]:
        return {"rounds": [] if self.open is None else [self.open]}

    def has_answered(self, round_id: str, delivered: list[tuple[str, int]], carried: Sequence[Any] = ()) -> None:
        """It keeps a reply to an earlier process; `delivered`: prompt and index of each trajectory."""
        records = [
            RecordedTrajectory("x", "r", "g", 1.0, {"prompt": prompt, "index": index}, [], [])
            for prompt, index in delivered
        ]
        rows = {"trajectories": list(carried)}
        self.answered[round_id] = RolloutReply(round_id, "r", 1, "quota", rows, {}, [], records)

    def get_round(self, round_id: str) -> RolloutReply:
        if round_id not in self.answered:
            raise AprilError(404, "round_id", "unknown")
        return self.answered[round_id]

    def stop(self, round_id: str) -> None:
        with self.change():
            self.stopped = True

    def drop(self, run: str) -> None:
        with self.change():
            self.dropped.append(run)
            self.done_.clear()
