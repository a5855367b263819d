"""The ways in which requests stay in flight between rounds: SGLang's own pause, and an asynchronous client.

A client cannot tell how many tokens a request in flight has, so these rounds have no carry of their own: `figures.py`
takes it from the scheduler's counter.
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
    """Requests that live across rounds, and a pile of finished groups."""

    def __init__(self, engine: EngineClient, plan: Plan, stream: Stream) -> None:
        super().__init__(engine, plan, stream)
        self.tasks: dict[asyncio.Task[OpenGroup], OpenGroup] = {}
        self.pile: list[OpenGroup] = []
        self.parked: list[OpenGroup] = []
        """Groups whose requests were aborted, because another variant had its turn."""
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
        """Output tokens of finished groups and of parked ones: while it rests, all there are."""
        return sum(group.tokens for group in self._undelivered)

    def _begin(self) -> None:
        super()._begin()
        self._round.generated = None

    async def rest(self) -> None:
        """Aborts what is in flight and keeps its tokens, to be sent again at the next round."""
        self._resting = True
        await self._thaw()
        while self.tasks:
            ending = list(self.tasks)
            await self.engine.abort_all()
            await asyncio.wait(ending, timeout=0.05)
            await asyncio.sleep(0)
        self._resting = False

    async def drain(self) -> RoundResult:
        """Waits for all that is in flight."""
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
        """Parked groups, then new ones, until so many are in flight."""
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
        """Waits for so many finished groups on the pile."""
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
    """SGLang's pause driven by a quota that the client counts: start more than is needed, pause, push, continue."""

    mode = ""

    async def round(self) -> RoundResult:
        """Goes on with what was paused, tops it up, pauses when the quota is there."""
        self._begin()
        await self._thaw()
        self._fill(self._target)
        await self._until(self.plan.groups)
        look = asyncio.ensure_future(self.engine.counters())
        await self.engine.post("/pause_generation", {"mode": self.mode})
        self._round.decoded_at_end = (await look).decoded
        done = self._deliver(self.plan.groups)
        if self.mode == "retract":
            # Each of these gets a token from the prefill of its next leg, which the decode counter does not see.
            done.legs += min(self.plan.slots, sum(len(group.pending) for group in self.tasks.values()))
        return done

    def refill(self) -> None:
        """Another group for each that the filter has rejected."""
        self._fill(self._target - len(self.pile))


class PauseRetract(Paused):
    """Running requests go back to the queue and are prefilled again under the new weights.

    Without a flush: SGLang 0.5.17 holds a queue with requests for busy, and a flush that fails ends its scheduler. What
    a retract frees never was in the radix tree, so only the prompts' KV is old.
    """

    name = "pause-retract"
    mode = "retract"
    flush_on_push = False


class PauseInPlace(Paused):
    """Running requests keep their slots and continue on old KV; no flush is possible."""

    name = "pause-in-place"
    mode = "in_place"
    flush_on_push = False


class Asynchronous(InFlight):
    """A client that never waits for the trainer: as many groups as the quota's factor in flight at any time, weights
    exchanged under a pause in place; it stops handing over while a quota of finished groups waits."""

    name = "async"
    flush_on_push = False

    async def push(self, checkpoint: Path) -> None:
        """Between two steps, on KV that stays."""
        await self.engine.post("/pause_generation", {"mode": "in_place"})
        await super().push(checkpoint)
        await self._thaw()

    async def round(self) -> RoundResult:
        """The next quota of finished groups, as soon as there is one."""
        self._begin()
        self.refill()
        await self._until(self.plan.groups)
        done = self._deliver(self.plan.groups)
        done.after_end = None
        self.refill()
        return done

    def refill(self) -> None:
        """One group for each that has finished."""
        if len(self.pile) < self.plan.groups:
            self._fill(self._target)
