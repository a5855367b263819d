"""Variants whose requests stay in flight between rounds: SGLang's pause, and an asynchronous client.

A client does not see how many tokens a request in flight has, so `metrics.py` derives their carry from the scheduler's
counters.
"""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from bench.rollout.baselines import ClientSideBaseline, OpenGroup
from bench.rollout.engine_client import EngineClient
from bench.rollout.variant import DeliveredGroup, Plan, RoundResult
from bench.rollout.workload import Stream


class InFlight(ClientSideBaseline):
    """Requests that stay in flight across rounds, and the finished groups that no round has delivered yet."""

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None:
        super().__init__(engine, plan, stream)
        self.tasks: dict[asyncio.Task[OpenGroup], OpenGroup] = {}
        self.pile: list[OpenGroup] = []
        self.parked: list[OpenGroup] = []
        """Groups whose requests were aborted while another variant was measured."""
        self._bell = asyncio.Event()
        self._failure: BaseException | None = None
        self._resting = False

    @property
    def _target(self) -> int:
        return math.ceil(self.plan.over_sampling * self.plan.groups)

    @property
    def _undelivered(self) -> Sequence[OpenGroup]:
        return [*self.tasks.values(), *self.pile, *self.parked]

    @property
    def held_tokens(self) -> int:
        """Output tokens of finished and parked groups; while the variant rests, of all groups."""
        return sum(group.tokens for group in self._undelivered)

    def _begin(self) -> None:
        super()._begin()
        self._round.generated = None
        # `rest` aborts every request, and their answers arrive in measured rounds: the client would count prefills that
        # only the benchmark causes. It does not see those of a pause with `retract`.
        self._round.reprefilled = None

    async def rest(self) -> None:
        """Abort requests in flight and keep their tokens, which the next round resends."""
        self._resting = True
        await self._thaw()
        while self.tasks:
            ending = list(self.tasks)
            await self.engine.abort_all()
            await asyncio.wait(ending, timeout=0.05)
            await asyncio.sleep(0)
        self._resting = False

    async def drain(self) -> RoundResult:
        """Wait for all requests in flight."""
        await self._thaw()
        self._resting = True
        for group in self._unpark():
            self._start(group)
        while self.tasks:
            await asyncio.wait(list(self.tasks))
            await asyncio.sleep(0)
        return self._deliver(len(self.pile))

    async def _thaw(self) -> None:
        await self.engine.post("/continue_generation", {"torch_empty_cache": False})

    def _unpark(self) -> list[OpenGroup]:
        groups, self.parked = self.parked, []
        return groups

    def _fill(self, target: int) -> None:
        """Start parked groups and then new ones until `target` groups are in flight."""
        for group in self._unpark():
            self._start(group)
        for group in self._new(target - len(self.tasks)):
            self._start(group)

    def _start(self, group: OpenGroup) -> None:
        task = asyncio.ensure_future(self._generate(group))
        self.tasks[task] = group
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[OpenGroup]) -> None:
        del self.tasks[task]
        self._bell.set()
        if error := task.exception():
            self._failure = error
        elif (group := task.result()).pending:
            self.parked.append(group)
        else:
            self.pile += self._reject([group])
            if not self._resting:
                self.refill()

    def refill(self) -> None:
        """Called when a group has finished."""

    async def _until(self, groups: int) -> None:
        """Wait until this many groups have finished."""
        while len(self.pile) < groups and not self._failure:
            self._bell.clear()
            await self._bell.wait()
        if self._failure:
            raise self._failure

    def _deliver(self, count: int) -> RoundResult:
        whole, self.pile = self.pile[:count], self.pile[count:]
        done = self._end(whole, 0)
        done.carry = None
        done.groups = [
            DeliveredGroup(group.prompt.id, [len(ids) for ids in group.output_ids], oldest_version=group.started)
            for group in whole
        ]
        return done


class Paused(InFlight):
    """SGLang's pause, driven by a quota that the client counts: over-sample, pause, push, continue."""

    mode = ""

    async def round(self) -> RoundResult:
        """Continue the paused requests, start more, and pause when the quota has finished."""
        self._begin()
        await self._thaw()
        self._fill(self._target)
        await self._until(self.plan.groups)
        counters = asyncio.ensure_future(self.engine.counters())
        await self.engine.post("/pause_generation", {"mode": self.mode})
        self._round.decoded_at_end = (await counters).decoded
        done = self._deliver(self.plan.groups)
        if self.mode == "retract":
            # Each of these gets a token from the prefill of its next leg, which the decode counter does not see.
            done.legs += min(self.plan.slots, sum(len(group.pending) for group in self.tasks.values()))
        return done

    def refill(self) -> None:
        """Start a group for each that the filter rejected."""
        self._fill(self._target - len(self.pile))


class PauseRetract(Paused):
    """Running requests return to the queue and are prefilled again under the new weights.

    No flush: SGLang 0.5.17 refuses to flush while requests are queued, and a failed flush ends its scheduler. A retract
    frees KV without inserting it into the radix tree, so only the KV of prompts is old.
    """

    name = "pause-retract"
    mode = "retract"
    flush_on_push = False


class PauseInPlace(Paused):
    """Running requests keep their slots and continue on old KV, which rules out a flush."""

    name = "pause-in-place"
    mode = "in_place"
    flush_on_push = False


class Asynchronous(InFlight):
    """A client that never waits for the trainer: it keeps the over-sampling factor times the quota in flight, pushes
    under an in-place pause, and starts no group while a quota of finished ones waits."""

    name = "async"
    flush_on_push = False

    async def push(self, checkpoint: Path) -> None:
        """Push under an in-place pause; KV is kept."""
        await self.engine.post("/pause_generation", {"mode": "in_place"})
        await super().push(checkpoint)
        await self._thaw()

    async def round(self) -> RoundResult:
        """Wait for the next quota of finished groups."""
        self._begin()
        self.refill()
        await self._until(self.plan.groups)
        done = self._deliver(self.plan.groups)
        done.after_end = None
        self.refill()
        return done

    def refill(self) -> None:
        """Start a group for each that has finished."""
        if len(self.pile) < self.plan.groups:
            self._fill(self._target)
