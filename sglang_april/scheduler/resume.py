"""Step 2 and 9 of 9 (admit, resume): free slots go to partials, then to groups already begun, then to new groups.

A sample on stored pages joins the running batch as a plain decode row, in a step that launches no prefill; one without
pages, or whose round wants fresh KV, is prefilled again through SGLang's own waiting queue.
"""

from sglang_april.scheduler.admission import pick
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.suspend import Suspender
from sglang_april.types import Sample


class Resumer:
    def __init__(self, context: Context, suspender: Suspender) -> None:
        self._c = context
        self._suspender = suspender
        self._resumable: list[Sample] = []
        self._turn = False

    def admit(self) -> None:
        """Once per step: fill the free slots. Samples with pages come first and alone; they join in `resume`."""
        self._resumable = []
        rounds = [r for r in self._c.rounds.values() if r.run.suspended or r.run.begun or r.run.new]
        if not rounds:
            return
        slots = self._slots()
        if slots <= 0:
            return
        chosen = pick(rounds, slots)
        self._take_turns()
        self._resumable = [s for s in chosen if self._keeps_pages(s)]
        if not self._resumable:
            self._start(chosen)

    def _slots(self) -> int:
        """Free slots, shared with stock requests that wait for one, so that both progress."""
        slots = self._c.engine.free_slots()
        strangers = self._c.engine.strangers_waiting()
        if slots <= 0 or not strangers:
            return slots
        if slots == 1:
            self._turn = not self._turn
            return int(self._turn)
        return slots - min(strangers, slots // 2)

    def _take_turns(self) -> None:
        """Round-robin: another run is first next time."""
        if len(self._c.rounds) > 1:
            name, rnd = next(iter(self._c.rounds.items()))
            del self._c.rounds[name]
            self._c.rounds[name] = rnd

    def _keeps_pages(self, sample: Sample) -> bool:
        """Whether the sample resumes on its pages; those that its round does not want are released (S6)."""
        if sample.pages is None:
            return False
        rnd = self._round(sample)
        if rnd.spec.kv == "recompute" and sample.kv_version < self._c.clock.version:
            self._c.engine.release(sample)
            return False
        return True

    def _round(self, sample: Sample) -> Round:
        return self._c.rounds[sample.group.run.name]

    # --- by prefill

    def _start(self, samples: list[Sample]) -> None:
        self._c.trace("start", samples)
        version = self._c.clock.version
        for sample in samples:
            rnd = self._round(sample)
            stats = rnd.stats
            stats.started += sample.length == 0
            stats.resumed_recomputed += sample.length > 0
            stats.kv_fallback += sample.length > 0 and rnd.spec.kv != "recompute"
            self._c.ledger.admit(sample)
            sample.admitted_round = rnd.number
            self._c.recorder.admitted(sample)
            sample.kv_version = version
            sample.recomputing = sample.length > 0
            sample.open_span(version, "recomputed" if sample.length else "fresh")
            self._c.engine.start(sample, proximal=rnd.spec.proximal)

    # --- on stored pages

    def resume(self) -> bool:
        """At the point of the step where a prefill could be launched; True if samples joined the batch instead."""
        engine = self._c.engine
        if not self._resumable or engine.mid_prefill():
            return False
        # A round may have ended since `admit`: a full queue can give a sample up at once.
        wanted = [s for s in self._resumable if self._c.round_of(s) is not None]
        taken = self._fit(wanted[: max(0, engine.row_slots())])
        self._resumable = []
        if not taken:
            return False
        taken.sort(key=lambda s: s.order)
        self._c.trace("resume", taken)
        version = self._c.clock.version
        for sample in taken:
            rnd = self._round(sample)
            rnd.stats.resumed_kept += 1
            self._c.ledger.admit(sample)
            sample.admitted_round = rnd.number
            if sample.kv_version < version:
                sample.open_span(version, "kept")
        engine.attach(taken)
        return True

    def _fit(self, samples: list[Sample]) -> list[Sample]:
        """The first of `samples` that fit SGLang's prefill budget; one at least when nothing else runs.

        That budget counts on a part of what running samples may still write; the decode of this very step is certain.
        """
        engine = self._c.engine
        taken: list[Sample] = []
        budget = min(engine.prefill_budget(), engine.tokens_free() - engine.tokens_for_next_decode())
        for sample in samples:
            need = self._need(sample)
            if need >= budget:
                if taken or not engine.idle():
                    break
                self._clear_the_way(sample, need)
            if sample.pages is None or (sample.pages.tier == "host" and not engine.to_device(sample.pages)):
                break
            taken.append(sample)
            budget -= need
        return taken

    def _need(self, sample: Sample) -> int:
        need = self._c.engine.remaining_estimate(sample)
        if sample.pages is not None and sample.pages.tier == "host":
            need += sample.pages.length + self._c.engine.page_size
        return need

    def _clear_the_way(self, sample: Sample, need: int) -> None:
        """Nothing runs and the first partial does not fit: the other partials' pages give way."""
        for other in self._suspender.on_device():
            if self._c.engine.prefill_budget() > need:
                return
            if other is not sample:
                self._suspender.demote(other)
