"""A discrete-event model of one engine and of rounds on it, for bench/simulate.py.

An engine takes steps. A step is a prefill of what joins, which costs `prefill_s + samples × prefill_sample_s + tokens ×
prefill_token_s`, or a decode of all that run, which costs `step_s + rows × row_s + KV tokens × kv_token_s`. In ours one
member of a group is prefilled in a round, and the others join on its prompt for `prefill_sample_s` each. A round begins
with a push and a gap; the variants differ in what they start, when they stop, and what a continued sample costs.
Everything is counted in engine steps; nothing is drawn at random but the lengths.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from bench.rollout.variant import Plan
from bench.rollout.workload import Prompt, Stream
from sglang_april.scheduler.admission import Gathering

WARM, MEASURED = 12, 40


@dataclass(frozen=True)
class Costs:
    """Seconds. `step_s`, `row_s`, `kv_token_s`: a decode step, each row, each KV token read; `prefill_s`,
    `prefill_sample_s`, `prefill_token_s`: a prefill forward, each sample in it (what else the engine does for one that
    comes and goes, too) and each of its tokens; `push_s`: a push; `gap_s`: from the last finish to the first step of
    the next round, beside the push; `abort_s`: the same for a client that aborts and sends again; `join_s`: a kept
    sample that joins the batch."""

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

    def decode(self, rows: int, tokens: int) -> float:
        """One decode step of so many rows that read so many KV tokens in all."""
        return self.step_s + rows * self.row_s + tokens * self.kv_token_s

    def full_rate(self, slots: int, context: float) -> float:
        """Tokens/s of a full batch at a mean context: the limit."""
        return slots / self.decode(slots, round(slots * context))


@dataclass(eq=False)
class Sample:
    """A response on its way."""

    group: "Group"
    target: int
    done: int = 0
    kept: bool = False
    """Its KV is in the engine: it joins without a prefill."""


@dataclass(eq=False)
class Group:
    """The responses to one prompt."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    prefilled_in: int = -1
    """The round in which some member has been prefilled: the KV of its prompt is there for the others."""

    @property
    def whole(self) -> bool:
        """All have finished."""
        return all(sample.done >= sample.target for sample in self.samples)


@dataclass
class Outcome:
    """Measured rounds: seconds and delivered tokens, and where the seconds went."""

    seconds: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    between_s: float = 0.0

    @property
    def rate(self) -> float:
        """Delivered tokens/s."""
        return self.tokens / self.seconds


class Simulation:
    """Rounds of one variant. `gather`: what our admission takes a prefill to cost, in decode steps (`Gathering`); with
    0, as in the others' rounds, whoever needs a prefill gets one at once."""

    def __init__(self, variant: str, plan: Plan, stream: Stream, costs: Costs, gather: float = Gathering.STEPS) -> None:
        self._variant, self._plan, self._stream, self._costs = variant, plan, stream, costs
        self._ours = variant.startswith("april")
        self._gather = gather if self._ours else 0.0
        self._lost = 0
        self._number = -1
        self._queue: deque[Sample] = deque()
        self._running: list[Sample] = []
        self._pile: list[Group] = []
        self._kv = 0
        self.outcome = Outcome()

    def run(self, warm: int = WARM, measured: int = MEASURED) -> Outcome:
        """The steady state's figures."""
        for number in range(warm + measured):
            self._number = number
            if number == warm:
                self.outcome = Outcome()
            self._round()
        return self.outcome

    def _round(self) -> None:
        costs, out = self._costs, self.outcome
        gap = costs.push_s + (costs.abort_s if self._variant == "outside" else costs.gap_s)
        out.seconds += gap
        out.between_s += gap
        if self._variant == "outside":
            needed = round(self._plan.over_sampling * self._plan.groups) - len(self._open_groups()) - len(self._pile)
            self._start(needed)
        elif self._variant == "synchronous":
            self._start(self._plan.groups)
        everything = self._variant == "synchronous"
        while len(self._pile) < self._plan.groups or (everything and (self._running or self._queue)):
            self._step()
        delivered, self._pile = self._pile[: self._plan.groups], self._pile[self._plan.groups :]
        out.tokens += sum(sum(group.prompt.lengths) for group in delivered)
        self._suspend()

    def _open_groups(self) -> set[Group]:
        return {sample.group for sample in (*self._running, *self._queue)}

    def _start(self, groups: int) -> None:
        for prompt in self._stream.take(groups):
            group = Group(prompt)
            group.samples = [Sample(group, target) for target in prompt.lengths]
            self._queue.extend(group.samples)

    def _suspend(self) -> None:
        keep = self._variant == "april-keep"
        for sample in self._running:
            sample.kept = keep
        # First in, first out: partials before what never ran.
        self._queue.extendleft(reversed(self._running))
        self._running, self._kv = [], 0

    def _step(self) -> None:
        """Whoever needs no prefill joins, or a prefill for the others if it is due, else a decode step."""
        free = self._plan.slots - len(self._running)
        if self._ours:
            while len(self._queue) < free + len(self._running):
                self._start(1)
        first = list(islice(self._queue, free))
        if ready := [sample for sample in first if self._is_ready(sample)]:
            self._join(ready)
        elif first and self._due(free):
            self._prefill(self._leaders(free) if self._ours else first)
        else:
            self._decode()

    def _is_ready(self, sample: Sample) -> bool:
        follows = self._ours and not sample.done and sample.group.prefilled_in == self._number
        return sample.kept or follows

    def _due(self, free: int) -> bool:
        self._lost += free
        if self._lost < self._gather * len(self._running):
            return False
        self._lost = 0
        return True

    def _leaders(self, free: int) -> list[Sample]:
        """As `scheduler/prompts.py` has it: one of each group, of groups enough for one batch."""
        room, led, chosen = free + len(self._running), set[Group](), list[Sample]()
        for sample in self._queue:
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

    def _join(self, samples: list[Sample]) -> None:
        """On KV that is there: their next token comes with the next decode."""
        kept = sum(sample.kept for sample in samples)
        self._enter(samples, kept * self._costs.join_s + (len(samples) - kept) * self._costs.prefill_sample_s)

    def _prefill(self, samples: list[Sample]) -> None:
        costs = self._costs
        tokens = sum(len(sample.group.prompt.input_ids) + sample.done for sample in samples)
        for sample in samples:
            sample.group.prefilled_in = self._number
            sample.done += 1
        self._enter(samples, costs.prefill_s + len(samples) * costs.prefill_sample_s + tokens * costs.prefill_token_s)

    def _enter(self, samples: list[Sample], took: float) -> None:
        gone = set(samples)
        self._queue = deque(sample for sample in self._queue if sample not in gone)
        self.outcome.seconds += took
        self.outcome.prefill_s += took
        for sample in samples:
            sample.kept = False
            self._kv += len(sample.group.prompt.input_ids) + sample.done
        self._running += samples
        self._finish()

    def _decode(self) -> None:
        took = self._costs.decode(len(self._running), self._kv)
        self.outcome.seconds += took
        self.outcome.decode_s += took
        self._kv += len(self._running)
        for sample in self._running:
            sample.done += 1
        self._finish()

    def _finish(self) -> None:
        ended = [sample for sample in self._running if sample.done >= sample.target]
        if not ended:
            return
        self._running = [sample for sample in self._running if sample.done < sample.target]
        self._kv -= sum(len(sample.group.prompt.input_ids) + sample.done for sample in ended)
        for group in dict.fromkeys(sample.group for sample in ended):
            if group.whole:
                self._pile.append(group)
