"""One engine of the model in bench/simulated_rounds.py: what runs, what waits, and the time of its steps.

A step is a prefill of the samples that join, which costs `prefill_s + samples × prefill_sample_s + tokens ×
prefill_token_s`, or a decode of all running samples, which costs `step_s + rows × row_s + KV tokens × kv_token_s`. With
the batch quota, one member of a group is prefilled and the others join on its prompt for `prefill_sample_s` each.
Consecutive decode steps in which nothing changes are taken as one stretch.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from bench.rollout.workload import WorkloadPrompt


@dataclass(frozen=True)
class Costs:
    """Seconds. `step_s`, `row_s`, `kv_token_s`: a decode step, each row, each KV token read; `prefill_s`,
    `prefill_sample_s`, `prefill_token_s`: a prefill forward, each sample in it (what else the engine does for one that
    comes and goes, too) and each of its tokens; `push_s`: a push; `gap_s`: from the last finish to the first step of
    the next round, beside the push; `abort_s`: the same for a client that aborts and sends again; `join_s`: a kept
    sample that joins the batch; `move_token_s`: a KV token that is moved off the device, or back; `follow_s`: a sample
    that joins on its prompt's KV, beyond what it costs as one that comes; `finish_s`: one that ends."""

    step_s: float
    row_s: float
    kv_token_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    push_s: float = 0.0
    gap_s: float = 0.0
    abort_s: float = 0.0
    join_s: float = 0.0
    prefill_sample_s: float = 0.0
    move_token_s: float = 0.0
    follow_s: float = 0.0
    finish_s: float = 0.0

    def decode(self, rows: int, tokens: int, steps: int = 1) -> float:
        """So many decode steps of so many rows, which read so many KV tokens in the first of them."""
        grown = rows * steps * (steps - 1) // 2
        return steps * (self.step_s + rows * self.row_s) + (steps * tokens + grown) * self.kv_token_s

    def full_rate(self, slots: int, context: float) -> float:
        """Tokens/s of a full batch at a mean context: the limit."""
        return slots / self.decode(slots, round(slots * context))


@dataclass(eq=False)
class SimulatedSample:
    """A response being generated."""

    group: "SimulatedGroup"
    target: int
    done: int = 0
    kept: bool = False
    """Its KV is in the engine: it joins without a prefill."""

    @property
    def tokens(self) -> int:
        """Tokens of its prompt and of itself."""
        return len(self.group.prompt.input_ids) + self.done


@dataclass(eq=False)
class SimulatedGroup:
    """The responses to one prompt."""

    prompt: WorkloadPrompt
    samples: list[SimulatedSample] = field(default_factory=list)
    prefilled_in: int = -1
    """The round in which some member has been prefilled: the KV of its prompt is there for the others."""

    @property
    def whole(self) -> bool:
        """Whether all samples have finished."""
        return all(sample.done >= sample.target for sample in self.samples)


class SimulatedEngine:
    """`ours`: it gathers leaders, and their followers join. `gather`: what a prefill is taken to cost, in decode steps
    (`PrefillBatcher`); with 0 every prefill starts at once. `found`: a partial's prefill finds its KV."""

    def __init__(self, costs: Costs, slots: int, *, ours: bool, gather: float, found: bool = False) -> None:
        self._costs, self._slots, self._ours, self._found = costs, slots, ours, found
        self._gather = gather if ours else 0.0
        self.queue: deque[SimulatedSample] = deque()
        self.running: list[SimulatedSample] = []
        self.clock = 0.0
        self.number = -1
        """Of the round."""
        self.decode_s = self.prefill_s = 0.0
        self._lost = 0
        self._kv = 0
        self._stretch = self._idle = 0
        """Decode steps in progress, and the slots that are waited for meanwhile."""

    def begun(self) -> set[SimulatedGroup]:
        """Groups with samples that run or wait."""
        return {sample.group for sample in (*self.running, *self.queue)}

    def add(self, prompt: WorkloadPrompt) -> None:
        """Add a waiting group."""
        group = SimulatedGroup(prompt)
        group.samples = [SimulatedSample(group, target) for target in prompt.lengths]
        self.queue.extend(group.samples)

    @property
    def wanting(self) -> int:
        """Samples that it could take beside those that wait, so that there are leaders of a whole batch."""
        return self._slots - len(self.queue)

    def next(self) -> float | None:
        """Begin what comes next; the time at which it ends, or None if there is nothing to do."""
        free = self._slots - len(self.running)
        first = list(islice(self.queue, free))
        if ready := [sample for sample in first if self._is_ready(sample)]:
            self._join(ready)
        elif first and self._due(free):
            self._prefill(self._leaders(free) if self._ours else first)
        elif self.running:
            self._idle = free if first else 0
            self._stretch = self._undisturbed()
            return self.clock + self._costs.decode(len(self.running), self._kv, self._stretch)
        else:
            return None
        return self.clock

    def end(self, until: float = math.inf) -> list[SimulatedGroup]:
        """What has begun ends, of a stretch the step in flight at `until`; groups that are whole now."""
        if self._stretch:
            self._decode(self._steps_until(until))
        ended = [sample for sample in self.running if sample.done >= sample.target]
        if not ended:
            return []
        self.running = [sample for sample in self.running if sample.done < sample.target]
        took = len(ended) * self._costs.finish_s
        self.clock += took
        self.decode_s += took
        self._kv -= sum(sample.tokens for sample in ended)
        return [group for group in dict.fromkeys(sample.group for sample in ended) if group.whole]

    def suspend(self, *, kept: bool) -> None:
        """All that run wait again, first in, first out: partials before what never ran."""
        for sample in self.running:
            sample.kept = kept
        self.queue.extendleft(reversed(self.running))
        self.running, self._kv = [], 0

    def _is_ready(self, sample: SimulatedSample) -> bool:
        return sample.kept or (self._ours and not sample.done and sample.group.prefilled_in == self.number)

    def _due(self, free: int) -> bool:
        if self._lost + free < self._gather * len(self.running):
            return False
        self._lost = 0
        return True

    def _undisturbed(self) -> int:
        """Decode steps until a sample ends, or until the idle slots have lost what a prefill costs."""
        steps = min(sample.target - sample.done for sample in self.running)
        if self._idle:
            left = self._gather * len(self.running) - self._lost
            steps = min(steps, math.ceil(left / self._idle) - 1)
        return max(1, steps)

    def _steps_until(self, until: float) -> int:
        low, high = 1, self._stretch
        while low < high:
            middle = (low + high) // 2
            if self.clock + self._costs.decode(len(self.running), self._kv, middle) >= until:
                high = middle
            else:
                low = middle + 1
        return low

    def _leaders(self, free: int) -> list[SimulatedSample]:
        """As `scheduler/prompts.py` has it: one of each group, of groups enough for one batch."""
        room, led, chosen = free + len(self.running), set[SimulatedGroup](), list[SimulatedSample]()
        for sample in self.queue:
            if len(chosen) == free or room <= 0:
                break
            if sample.done:
                room -= 1
            elif sample.group in led:
                continue
            else:
                led.add(sample.group)
                room -= sum(not other.done for other in sample.group.samples)
            chosen.append(sample)
        return chosen

    def _join(self, samples: list[SimulatedSample]) -> None:
        """On KV that is there: their next token comes with the next decode."""
        kept = [sample for sample in samples if sample.kept]
        took = len(kept) * self._costs.join_s + sum(x.tokens for x in kept) * self._costs.move_token_s
        self._enter(samples, took + (len(samples) - len(kept)) * (self._costs.prefill_sample_s + self._costs.follow_s))

    def _prefill(self, samples: list[SimulatedSample]) -> None:
        costs = self._costs
        tokens = sum(1 if self._found and sample.done else sample.tokens for sample in samples)
        for sample in samples:
            sample.group.prefilled_in = self.number
            sample.done += 1
        self._enter(samples, costs.prefill_s + len(samples) * costs.prefill_sample_s + tokens * costs.prefill_token_s)

    def _enter(self, samples: list[SimulatedSample], took: float) -> None:
        gone = set(samples)
        self.queue = deque(sample for sample in self.queue if sample not in gone)
        self.clock += took
        self.prefill_s += took
        for sample in samples:
            sample.kept = False
            self._kv += sample.tokens
        self.running += samples

    def _decode(self, steps: int) -> None:
        took = self._costs.decode(len(self.running), self._kv, steps)
        self.clock += took
        self.decode_s += took
        self._kv += steps * len(self.running)
        self._lost += steps * self._idle
        self._stretch = 0
        for sample in self.running:
            sample.done += steps
