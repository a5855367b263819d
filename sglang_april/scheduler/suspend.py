"""Step 4 of 9 (suspend): running samples leave the engine, and their pages go where there is room (step 5)."""

from collections.abc import Callable, Collection

from sglang_april.api.messages import Tier
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.state import Run, Sample, State
from sglang_april.scheduler.tiers import Tiers

AHEAD_STEPS = 4
"""Room for so many decode steps is kept free by copies that nobody waits for."""


class Suspender:
    def __init__(self, context: Context, tiers: Tiers) -> None:
        self._c = context
        self._tiers = tiers

    def suspend_all(self) -> None:
        """Before anything that needs our samples out of the engine: a push, a flush, a pause, a release (S2)."""
        if any(run.groups for run in self._c.ledger.runs.values()):
            self._c.engine.settle()
            self.suspend(list(self._c.ledger.samples(State.RUNNING)))

    def suspend_run(self, run: Run, tier: Tier) -> None:
        """At the end of a round; the step in flight has been settled. Copies are ordered, not waited for."""
        samples = run.samples(State.RUNNING)
        self.suspend(samples)
        if tier != "auto":
            for sample in samples:
                self._tiers.demote(sample, tier)

    def suspend(self, samples: list[Sample]) -> None:
        samples = sorted((s for s in samples if s.state is State.RUNNING), key=lambda s: s.order)
        if not samples:
            return
        self._c.trace("suspend", samples)
        self._c.engine.detach(samples)
        for sample in samples:
            self._c.recorder.suspended(sample)
            self._c.ledger.suspend(sample)
        self._tiers.arrived(samples)

    # --- memory pressure

    def evacuate(self) -> None:
        """Before the pools are cleared or unmapped: no device page stays. The most worthy find room first."""
        tiers = self._tiers
        for sample in reversed(tiers.all_on_device()):
            tiers.demote(sample)
        while (leaving := tiers.moves.next_leaving()) is not None:
            tiers.free_now(leaving)

    def relieve(self) -> None:
        """Partials give way to running work: demote what is suspended, then suspend what is ours (newest first)."""
        engine = self._c.engine
        need = engine.tokens_for_next_decode()
        self._free_device(need)
        if need > engine.tokens_free():
            self._suspend_newest()
        self._lower_until(lambda leaving: engine.tokens_free() + leaving >= AHEAD_STEPS * need)
        if wanted := engine.first_waiting_need():
            self._lower_until(lambda leaving: engine.prefill_budget() + leaving > wanted, besides=self._tiers.expected)

    def _lower_until(self, enough: Callable[[int], bool], besides: Collection[Sample] = ()) -> None:
        """Order copies, the least worthy first; their slots come free when they are complete."""
        while not enough(self._tiers.moves.leaving_tokens()):
            sample = self._tiers.first_on_device(besides)
            if sample is None:
                return
            self._tiers.demote(sample)

    def _free_device(self, wanted: int) -> None:
        """Until `wanted` pool tokens are free, whatever has to be waited for: the next step writes to them."""
        tiers = self._tiers
        while wanted > self._c.engine.tokens_free():
            if (sample := tiers.moves.next_leaving()) is not None:
                tiers.free_now(sample)
            elif (sample := tiers.first_on_device() or tiers.moves.last_loading()) is not None:
                tiers.demote(sample)
            else:
                return

    def _suspend_newest(self) -> None:
        """The last one keeps running: with nothing else left to move, SGLang's own retract decides."""
        engine = self._c.engine
        engine.settle()
        running = engine.newest_first(list(self._c.ledger.samples(State.RUNNING)))
        for sample in running[:-1]:
            if engine.tokens_for_next_decode() <= engine.tokens_free():
                return
            self.suspend([sample])
            if rnd := self._c.active_round(sample):
                rnd.stats.suspended_for_memory += 1
            self._free_device(engine.tokens_for_next_decode())
