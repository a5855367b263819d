"""Step 4 of 9 (suspend): running samples leave the engine, and their pages go where there is room (step 5)."""

from collections.abc import Iterable

from sglang_april.scheduler.context import Context
from sglang_april.store.placement import by_worth, room_on_host
from sglang_april.types import Run, Sample, State
from sglang_april.wire import Tier


class Suspender:
    def __init__(self, context: Context) -> None:
        self._c = context

    def suspend_all(self) -> None:
        """Before anything that needs our samples out of the engine: a push, a flush, a pause, a release (S2)."""
        if any(run.groups for run in self._c.ledger.runs.values()):
            self._c.engine.settle()
            self.suspend(list(self._c.ledger.samples(State.RUNNING)))

    def suspend_run(self, run: Run, tier: Tier) -> None:
        """At the end of a round; the step in flight has been settled."""
        samples = run.samples(State.RUNNING)
        self.suspend(samples)
        if tier in ("host", "none"):
            for sample in (s for s in samples if s.pages is not None):
                self.demote(sample, tokens_only=tier == "none")

    def suspend(self, samples: list[Sample]) -> None:
        samples = sorted((s for s in samples if s.state is State.RUNNING), key=lambda s: s.order)
        if not samples:
            return
        self._c.trace("suspend", samples)
        self._c.engine.detach(samples)
        for sample in samples:
            self._c.recorder.suspended(sample)
            self._c.ledger.suspend(sample)

    # --- where pages go

    def demote(self, sample: Sample, *, tokens_only: bool = False) -> None:
        """Device pages to the host tier, or, where that is full, to tokens only."""
        engine, pages = self._c.engine, sample.pages
        if pages is None:
            return
        if not tokens_only and pages.tier == "device" and self._make_host_room(sample):
            self._c.trace("host", [sample])
            engine.to_host(pages)
        else:
            self._c.trace("none", [sample])
            engine.release(sample)

    def _make_host_room(self, newcomer: Sample) -> bool:
        stored = [s for s in self._stored() if s.pages and s.pages.tier == "host"]
        used = sum(s.pages.length for s in stored if s.pages)
        order = by_worth([*stored, newcomer], self._c.must_finish)
        cheaper = order[: order.index(newcomer)]
        evicted = room_on_host(newcomer, cheaper, used, self._c.host_cap_tokens)
        if evicted is None:
            return False
        for sample in evicted:
            self._c.trace("evict", [sample])
            self._c.engine.release(sample)
        return True

    def _stored(self) -> Iterable[Sample]:
        return (s for run in self._c.ledger.runs.values() for s in run.suspended if s.pages is not None)

    def on_device(self) -> list[Sample]:
        """Suspended samples that hold device pages, the one that gives way first in front."""
        return by_worth((s for s in self._stored() if s.pages and s.pages.tier == "device"), self._c.must_finish)

    def evacuate(self) -> None:
        """Before the pools are cleared or unmapped: no device page stays."""
        for sample in reversed(self.on_device()):
            self.demote(sample)

    # --- memory pressure

    def relieve(self) -> None:
        """Partials give way to running work: demote what is suspended, then suspend what is ours (newest first)."""
        engine = self._c.engine
        self._free_device(engine.tokens_for_next_decode())
        if engine.tokens_for_next_decode() > engine.tokens_free():
            self._suspend_newest()
        if need := engine.first_waiting_need():
            for sample in self.on_device():
                if engine.prefill_budget() > need:
                    break
                self.demote(sample)

    def _free_device(self, wanted: int) -> None:
        """Demote suspended samples until `wanted` pool tokens are free."""
        if wanted <= self._c.engine.tokens_free():
            return
        for sample in self.on_device():
            self.demote(sample)
            if wanted <= self._c.engine.tokens_free():
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
            if rnd := self._c.round_of(sample):
                rnd.stats.suspended_for_memory += 1
            self.demote(sample)
