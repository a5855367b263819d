"""Suspends running samples, and demotes pages when memory runs short (`partials-yield`)."""

from collections.abc import Callable, Collection

from sglang_april.api.messages import Tier
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tiers import Tiers

HEADROOM_STEPS = 4
"""Decode steps for which background copies keep pool tokens free."""


class Suspender:
    def __init__(self, context: Context, tiers: Tiers) -> None:
        self._c = context
        self._tiers = tiers

    def suspend_all(self) -> None:
        """Take all rollout samples out of the engine, before a push, flush, pause or release.

        See `suspend-before-interrupt` in docs/design.md.
        """
        # Also without samples: a request that has just ended is still in SGLang's batch, and would block a flush.
        self.suspend_now(list(self._c.ledger.samples(State.RUNNING)))

    def suspend_now(self, samples: list[Sample]) -> None:
        """Suspend those of `samples` that still run once the step in flight is processed."""
        self._c.engine.settle()
        self.suspend(samples)

    def keep_within(self, run: Run, limit: int) -> None:
        """Suspend what a run that ran ahead has running beyond the new round's `concurrency`."""
        if run.running > limit:
            self.suspend_now(sorted(run.samples(State.RUNNING), key=lambda s: s.queue_position)[limit:])

    def suspend_run(self, run: Run, tier: Tier) -> None:
        """Suspend a run at the end of a round, after `Engine.settle`. Copies are ordered and not waited for."""
        samples = run.samples(State.RUNNING)
        self.suspend(samples)
        if tier != "auto":
            for sample in self._tiers.highest_first(samples):
                self._tiers.demote(sample, tier)

    def suspend(self, samples: list[Sample]) -> None:
        """Suspend the running ones of `samples`."""
        samples = sorted((s for s in samples if s.state is State.RUNNING), key=lambda s: s.queue_position)
        if not samples:
            return
        self._c.trace("suspend", samples)
        for sample in samples:
            self._c.recorder.drawn(sample)
        self._c.engine.detach(samples)
        for sample in samples:
            self._c.ledger.suspend(sample)
            if sample.kv.pages is None:  # in the middle of its prefill
                self._tiers.drop_prefix(sample)
        self._tiers.add_suspended(samples)

    # --- memory pressure

    def evacuate(self) -> None:
        """Move all device pages to lower tiers before the pool is cleared or unmapped (`evacuate-before-clear`).

        The pages of the highest priority go first, so that they find room.
        """
        tiers = self._tiers
        for sample in reversed(tiers.remove_all_on_device()):
            tiers.demote(sample)
        while (copying := tiers.transfers.first_copying_out()) is not None:
            tiers.free_slots_now(copying)

    def relieve_pressure(self) -> None:
        """Make room for running work: demote partials, then suspend the newest running samples."""
        engine = self._c.engine
        if engine.tokens_free() < HEADROOM_STEPS * engine.most_for_next_decode():
            need = engine.tokens_for_next_decode()
            self._free_device(need)
            if need > engine.tokens_free():
                self._suspend_newest()
            self._demote_until(lambda coming: engine.tokens_free() + coming >= HEADROOM_STEPS * need)
        if (wanted := engine.first_waiting_need()) and (engine.row_slots() > 0 or engine.preempts):
            first = engine.first_waiting_on_kv()
            kept = [s for s in (*self._c.reservations.loading, first) if s is not None]
            self._demote_until(lambda coming: engine.prefill_budget() + coming > wanted, excluding=kept)
            if first is not None and self._no_memory_is_coming() and engine.prefill_budget() <= wanted:
                self._tiers.release(first)  # it does not fit beside its own KV, whose last page it may not even use

    def _no_memory_is_coming(self) -> bool:
        """Whether nothing runs, and no copy is in flight, that would free memory at its end."""
        runs = self._c.engine.most_for_next_decode() or self._c.engine.mid_prefill()
        return not runs and not len(self._tiers.transfers)

    def _demote_until(self, enough: Callable[[int], bool], excluding: Collection[Sample] = ()) -> None:
        """Order copies in eviction order until `enough` of the tokens that they will free; they are not waited for."""
        tiers = self._tiers
        while (sample := tiers.next_victim_on_device(excluding)) and not enough(tiers.transfers.tokens_being_freed()):
            tiers.demote(sample)

    def _free_device(self, wanted: int) -> None:
        """Free pool tokens until `wanted` are available, waiting for copies: the next step writes to them."""
        tiers = self._tiers
        while wanted > self._c.engine.tokens_free():
            if (sample := tiers.transfers.first_copying_out()) is not None:
                tiers.free_slots_now(sample)
            elif (sample := tiers.next_victim_on_device() or tiers.transfers.last_loading()) is not None:
                tiers.demote(sample)
            else:
                return

    def _suspend_newest(self) -> None:
        """Suspend running samples, newest first. The last one keeps running: SGLang can still retract it."""
        engine = self._c.engine
        engine.settle()
        self._free_device(engine.tokens_for_next_decode())  # the step in flight may have ended a leg and parked its KV
        running = engine.newest_first(list(self._c.ledger.samples(State.RUNNING)))
        for sample in running[:-1]:
            if engine.tokens_for_next_decode() <= engine.tokens_free():
                return
            self.suspend([sample])
            if rnd := self._c.active_round(sample):
                rnd.stats.suspended_for_memory += 1
            self._free_device(engine.tokens_for_next_decode())
