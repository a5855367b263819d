"""The trajectories of one run: starts the agents of a prompt, repeats those that fail, ends the others at the engine.

The trajectories of a prompt form a group (docs/trajectories.md). With `quota_unit: group` they are ended at the engine
together, when all agents of the prompt have returned a reward; so a group that is given up or judged out can still be
rejected as a whole. All methods are called by one thread (`agent_rollout.py`).
"""

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_april.client import AprilClient, AprilError, RecordedTrajectory, attach
from trainer_bridge.agent_runner import AgentError, AgentRunner
from trainer_bridge.agents import AgentFinished, AgentTask, StartAgent
from trainer_bridge.rewards import TrainingPrompt
from trainer_bridge.validate import RunError

ATTEMPTS = 2
"""Attempts at a trajectory before its group is given up."""
FAILURES_IN_A_ROW = 32
"""Number of consecutive failed trajectories that ends the run, because its agent always fails."""


@dataclass(slots=True, eq=False)
class PromptTrajectories:
    """The trajectories of a prompt, by their index."""

    prompt: TrainingPrompt
    running: dict[int, str] = field(default_factory=dict)
    """Names at the engine of those whose agents run."""
    finished: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Names and rewards of those that have one."""
    failures: dict[int, int] = field(default_factory=dict)


class AgentTrajectories:
    """The trajectories of one run that the engine has not delivered."""

    def __init__(
        self,
        client: AprilClient,
        runner: AgentRunner,
        run: str,
        n: int,
        sampling: Mapping[str, Any],
        *,
        whole_groups: bool,
        accept: Callable[[list[float]], bool],
        replace: Callable[[TrainingPrompt, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            n: trajectories of a prompt.
            sampling: for `AgentTask.sampling`, without the seed, which differs per trajectory.
            whole_groups: end the trajectories of a prompt together.
            accept: whether rewards of a group can be trained on; read only with `whole_groups`.
            replace: called when a group is rejected, with the reason if its agents failed, else "".
        """
        self._client, self._runner, self.run, self._n, self._sampling = client, runner, run, n, sampling
        self._whole_groups, self._accept, self._replace, self._warn = whole_groups, accept, replace, warn
        self._groups: dict[str, PromptTrajectories] = {}
        self._group_of: dict[str, tuple[PromptTrajectories, int]] = {}
        """Group and index of each trajectory whose agent runs."""
        self._attempt = uuid.uuid4().hex[:6]
        """Part of the names, so that no name of an earlier process or a lost engine recurs."""
        self._failures_in_a_row = 0
        """Failures since the last trajectory that succeeded."""

    @property
    def prompts(self) -> Collection[str]:
        """Ids of the prompts that have trajectories."""
        return self._groups.keys()

    @property
    def all_finished(self) -> bool:
        """Whether no agent runs."""
        return not self._group_of

    def start(self, prompt: TrainingPrompt) -> None:
        """Start the agents of a prompt."""
        group = self._groups[prompt.id] = PromptTrajectories(prompt)
        for index in range(self._n):
            self._start(group, index)

    def finished(self, finished: AgentFinished) -> bool:
        """Take the end of an agent; False if it is none of these."""
        group, index = self._group_of.pop(finished.id, (None, 0))
        if group is None:
            return False
        del group.running[index]
        if finished.reward is None:
            self._failed(group, index, finished.id, finished.problem)
        else:
            self._failures_in_a_row = 0
            group.finished[index] = finished.id, finished.reward
            if not self._whole_groups:
                self._done(group, [index])
            elif len(group.finished) == self._n:
                self._judge(group)
        return True

    def unstarted(self) -> set[str]:
        """Prompts of whose trajectories none is done and none has a token."""
        return {prompt_id for prompt_id, group in self._groups.items() if not self._is_begun(group)}

    def _is_begun(self, group: PromptTrajectories) -> bool:
        done = len(group.finished) == self._n if self._whole_groups else bool(group.finished)
        known = (self._find(name) for name in self._names(group))
        return done or any(one is not None and one.tokens for one in known)

    def delivered(self, prompt_id: str, index: int) -> bool:
        """Forget a trajectory that the engine has delivered; True if it was the last one of its prompt."""
        group = self._groups.get(prompt_id)
        if group is None:
            return True  # of an earlier process, which started the same ones
        group.finished.pop(index, None)
        if group.finished or group.running:
            return False
        del self._groups[prompt_id]
        return True

    def cancel(self, prompt_ids: Collection[str] | None = None) -> None:
        """Cancel the agents of these prompts, or of all, and forget them. What the engine has of them stays there."""
        for prompt_id in list(self._groups) if prompt_ids is None else prompt_ids:
            group = self._groups.pop(prompt_id)
            self._runner.cancel(group.running.values())
            for name in group.running.values():
                del self._group_of[name]

    def reject(self, prompt_ids: Collection[str]) -> None:
        """Cancel the agents of these prompts, and delete what the engine has of them."""
        groups = [self._groups[prompt_id] for prompt_id in prompt_ids]
        names = [name for group in groups for name in self._names(group)]
        self.cancel(prompt_ids)
        self._reject(names)

    # One trajectory

    def _start(self, group: PromptTrajectories, index: int) -> None:
        prompt, failures = group.prompt, group.failures.get(index, 0)
        name = f"{prompt.id}.{index}.{self._attempt}{failures}"
        task_id = f"{prompt.id}.{index}"
        sampling = {**self._sampling, "seed": _seed(self._sampling["seed"], task_id)}
        task = AgentTask(task_id, index, prompt.content, prompt.label, prompt.metadata, sampling)
        headers = attach(self.run, name, self._group_name(group) if self._whole_groups else None)
        group.running[index] = name
        self._group_of[name] = group, index
        try:
            self._runner.start(self.run, StartAgent(name, task, headers))
        except AgentError as error:  # a worker that died was started again
            raise RunError(f"agent: {error}") from error

    def _names(self, group: PromptTrajectories) -> list[str]:
        return [*group.running.values(), *(name for name, _ in group.finished.values())]

    def _group_name(self, group: PromptTrajectories) -> str:
        return f"{group.prompt.id}.{self._attempt}"

    def _failed(self, group: PromptTrajectories, index: int, name: str, problem: str) -> None:
        """Repeat a trajectory that failed, or give its group up."""
        self._failures_in_a_row += 1
        # A process that dies, or a timeout, ends many at once: only repeats that fail as well show that none succeeds.
        if self._failures_in_a_row >= max(FAILURES_IN_A_ROW, ATTEMPTS * (len(self._group_of) + 1)):
            raise RunError(f"{self._failures_in_a_row} trajectories in a row failed, the last one: {problem}")
        group.failures[index] = group.failures.get(index, 0) + 1
        repeats = group.failures[index] < ATTEMPTS
        self._warn(f"trajectory {name} is rejected{', and repeated' if repeats else ''}: {problem}")
        self._reject([name])
        if repeats:
            self._start(group, index)
        elif self._whole_groups:
            self._give_up(group, f"{name}: {problem}")
        elif not group.running and not group.finished:
            del self._groups[group.prompt.id]
            self._replace(group.prompt, f"{name}: {problem}")

    def _give_up(self, group: PromptTrajectories, reason: str) -> None:
        """Reject a whole group."""
        self.reject([group.prompt.id])
        self._replace(group.prompt, reason)

    def _judge(self, group: PromptTrajectories) -> None:
        if self._accept([reward for _, reward in group.finished.values()]):
            self._done(group, list(group.finished))
        else:
            self._give_up(group, "")

    # At the engine

    def _done(self, group: PromptTrajectories, indices: list[int]) -> None:
        """End trajectories that have a reward. Those of agents that made no request do not exist, and have failed."""
        names = {index: group.finished[index][0] for index in indices}
        ends = {
            names[index]: {
                "reward": group.finished[index][1],
                "metadata": {"prompt": group.prompt.id, "index": index},
            }
            for index in indices
        }
        try:
            self._client.done(self.run, ends)
        except AprilError as error:
            if error.status != 404:
                raise
            missing = [index for index in indices if self._find(names[index]) is None]
            if not missing:
                raise
            for index in missing:
                del group.finished[index]
            for index in missing:
                if self._groups.get(group.prompt.id) is group:  # a failure may give the group up
                    self._failed(group, index, names[index], "the agent made no request")

    def _find(self, name: str) -> RecordedTrajectory | None:
        """A trajectory, if the engine knows it."""
        try:
            return self._client.trajectory(name, self.run)
        except AprilError as error:
            if error.status != 404:
                raise
            return None

    def _reject(self, names: list[str]) -> None:
        """Delete trajectories at the engine, which then refuses their requests, even the first one."""
        for name in names:
            try:
                self._client.done(self.run, reject=[name])
            except AprilError as error:
                if error.status != 404:  # an engine that was restarted without a journal does not know the run
                    raise


def _seed(seed: int, task_id: str) -> int:
    """31 bits: the seed of a trajectory, the same in every run with the same `rollout_seed`."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task_id}".encode(), digest_size=4).digest()) >> 1
