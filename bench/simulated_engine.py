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
    """Costs in seconds.

    - `step_s`, `row_s`, `kv_token_s`: a decode step, each row in it, each KV token that it reads.
    - `prefill_s`, `prefill_sample_s`, `prefill_token_s`: a prefill forward, each sample in it (including the engine's
      per-request work) and each of its tokens.
    - `push_s`: a push. `gap_s`: from the last finish to the first step of the next round, without the push. `abort_s`:
      the same for a client that aborts and resends.
    - `join_s`: a sample that joins the batch on its stored KV. `follow_s`: one that joins on the KV of its prompt, in
      addition to `prefill_sample_s`. `finish_s`: one that ends.
    - `move_token_s`: a KV token that is copied off the device or back.
    """

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
        """Seconds of `steps` decode steps of `rows` rows; `tokens`: KV tokens that the first of them reads."""
        grown = rows * steps * (steps - 1) // 2
        return steps * (self.step_s + rows * self.row_s) + (steps * tokens + grown) * self.kv_token_s

    def full_rate(self, slots: int, context: float) -> float:
        """Tokens/s of a full batch at this mean context: the upper limit of any variant."""
        return slots / self.decode(slots, round(slots * context))


@dataclass(eq=False)
class SimulatedSample:
    """A response being generated."""

    group: "SimulatedGroup"
    target: int
    done: int = 0
    kept: bool = False
    """Whether its KV is stored, so that it joins without a prefill."""

    @property
    def tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.group.prompt.input_ids) + self.done


@dataclass(eq=False)
class SimulatedGroup:
    """The responses to one prompt."""

    prompt: WorkloadPrompt
    samples: list[SimulatedSample] = field(default_factory=list)
    prefilled_in: int = -1
    """The last round in which a member was prefilled; the others can join on its prompt's KV."""

    @property
    def whole(self) -> bool:
        """Whether all samples have finished."""
        return all(sample.done >= sample.target for sample in self.samples)


class SimulatedEngine:
    """One engine.

    Args:
        shares_prompts: one member of each group is prefilled, and the others join on its prompt (the batch quota).
        batching: assumed cost of a prefill in decode steps, for `PrefillBatcher`; with 0 every prefill starts at once.
        prefix_cached: the prefill of a partial finds its KV in the prefix cache.
    """

    def __init__(
        self, costs: Costs, slots: int, *, shares_prompts: bool, batching: float, prefix_cached: bool = False
    ) -> None:
        self._costs, self._slots = costs, slots
        self._shares_prompts, self._prefix_cached = shares_prompts, prefix_cached
        self._batching = batching if shares_prompts else 0.0
        self.queue: deque[SimulatedSample] = deque()
        self.running: list[SimulatedSample] = []
        self.clock = 0.0
        self.round_number = -1
        self.decode_s = self.prefill_s = 0.0
        self._lost = 0
        self._kv = 0
        self._stretch = self._idle = 0
        """Decode steps in progress, and the slots that are free meanwhile."""

    def open_groups(self) -> set[SimulatedGroup]:
        """Groups with running or waiting samples."""
        return {sample.group for sample in (*self.running, *self.queue)}

    def add(self, prompt: WorkloadPrompt) -> None:
        """Add a waiting group."""
        group = SimulatedGroup(prompt)
        group.samples = [SimulatedSample(group, target) for target in prompt.lengths]
        self.queue.extend(group.samples)

    @property
    def missing(self) -> int:
        """Samples to add so that a whole batch waits."""
        return self._slots - len(self.queue)

    def next(self) -> float | None:
        """Begin the next step and return the time at which it ends, or None without work."""
        free = self._slots - len(self.running)
        first = list(islice(self.queue, free))
        if ready := [sample for sample in first if self._is_ready(sample)]:
            self._join(ready)
        elif first and self._due(free):
            self._prefill(self._leaders(free) if self._shares_prompts else first)
        elif self.running:
            self._idle = free if first else 0
            self._stretch = self._undisturbed()
            return self.clock + self._costs.decode(len(self.running), self._kv, self._stretch)
        else:
            return None
        return self.clock

    def end(self, until: float = math.inf) -> list[SimulatedGroup]:
        """End the step that `next` began (of several decode steps, the one in flight at `until`); returns completed
        groups."""
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
        """Return running samples to the head of the queue in their order."""
        for sample in self.running:
            sample.kept = kept
        self.queue.extendleft(reversed(self.running))
        self.running, self._kv = [], 0

    def _is_ready(self, sample: SimulatedSample) -> bool:
        return sample.kept or (
            self._shares_prompts and not sample.done and sample.group.prefilled_in == self.round_number
        )

    def _due(self, free: int) -> bool:
        if self._lost + free < self._batching * len(self.running):
            return False
        self._lost = 0
        return True

    def _undisturbed(self) -> int:
        """Decode steps until a sample ends or the idle slots have cost as much as a prefill."""
        steps = min(sample.target - sample.done for sample in self.running)
        if self._idle:
            left = self._batching * len(self.running) - self._lost
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
        """One sample of each group, for as many groups as fill a batch (as in `scheduler/prompts.py`)."""
        free_slots, led, chosen = free + len(self.running), set[SimulatedGroup](), list[SimulatedSample]()
        for sample in self.queue:
            if len(chosen) == free or free_slots <= 0:
                break
            if sample.done:
                free_slots -= 1
            elif sample.group in led:
                continue
            else:
                led.add(sample.group)
                free_slots -= sum(not other.done for other in sample.group.samples)
            chosen.append(sample)
        return chosen

    def _join(self, samples: list[SimulatedSample]) -> None:
        """Add samples whose KV exists; the next decode draws their next tokens."""
        kept = [sample for sample in samples if sample.kept]
        took = len(kept) * self._costs.join_s + sum(x.tokens for x in kept) * self._costs.move_token_s
        self._enter(samples, took + (len(samples) - len(kept)) * (self._costs.prefill_sample_s + self._costs.follow_s))

    def _prefill(self, samples: list[SimulatedSample]) -> None:
        costs = self._costs
        tokens = sum(1 if self._prefix_cached and sample.done else sample.tokens for sample in samples)
        for sample in samples:
            sample.group.prefilled_in = self.round_number
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
