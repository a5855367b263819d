"""Fills free slots: partials first, then groups already begun, then new groups (`admission-order`).

A sample on stored pages, or on the KV of its group's prompt, joins the running batch as a plain decode row, in a step
that launches no prefill. Every other sample, and one whose round asks for fresh KV, is prefilled through SGLang's own
waiting queue.
"""

from collections import Counter
from collections.abc import Iterable

from sglang_april.kv.cost_model import Reason, why_not_resume
from sglang_april.kv.kv_pages import KvState, Pages, Tier
from sglang_april.scheduler.admission import PrefillBatcher, pick
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.join_memory import OVERTAKEN_STEPS, JoinMemory
from sglang_april.scheduler.prompts import PromptSharing
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tiers import Tiers

MAX_LOADED_AHEAD = 4
"""Partials that are loaded at a time before a slot is free for them."""
MAX_LEG_LOADS = 2
"""How often the KV of an earlier leg is loaded for a leg, which memory pressure may undo before its prefill."""
LOAD_AHEAD_INTERVAL = 8
"""Steps between two attempts to load ahead."""


class Resumer:
    def __init__(self, context: Context, tiers: Tiers) -> None:
        self._c = context
        self._tiers = tiers
        self._to_join: list[Sample] = []
        """Samples of this step that have a slot and need no prefill."""
        self._prefill_batcher = PrefillBatcher()
        self._prompts = PromptSharing(context)
        self._memory = JoinMemory(context, tiers, self._prompts)

    def admit(self) -> None:
        """Fill the free slots, once per step.

        Samples that need no prefill have priority over the others; they join in `resume`. The others wait for a shared
        prefill, unless one is launched anyway.
        """
        self._to_join = []
        engine, reservations = self._c.engine, self._c.reservations
        rounds = self._open_rounds()
        ahead = self._running_ahead() if self._c.ahead else []
        if not rounds and not ahead:
            return
        slots = reservations.rollout_slots(engine.free_slots(), engine.foreign_waiting())
        if slots <= 0:
            self._load_ahead([*rounds, *ahead])
            return
        chosen = pick(rounds, slots)
        chosen += pick(ahead, slots - len(chosen))
        reservations.end_turn()
        for rnd in (*rounds[:1], *ahead[:1]):
            rnd.last_first = self._c.step
        self._to_join = [s for s in chosen if self._needs_no_prefill(s)]
        if self._to_join or all(self._prompts.awaits_leader(s) for s in chosen):
            return
        due = self._prefill_batcher.is_due([*rounds, *ahead], chosen, slots)
        if due or engine.foreign_waiting() or engine.mid_prefill():
            # Each run keeps its share of the slots: those that its leaders leave are for their followers.
            share = Counter(s.group.run for s in chosen)
            leaders = pick([*rounds, *ahead], slots, lambda rnd: self._prompts.select_for_prefill(rnd, share[rnd.run]))
            self._start(leaders)

    def has_work(self) -> bool:
        """Whether the next step could start a sample, so that an idle scheduler loop must not sleep.

        While transfers are in flight the loop may sleep: the message that ends one wakes it up.
        """
        if len(self._tiers.transfers) or not self._c.may_step():
            return False
        return bool(pick(self._open_rounds(), 1) or pick(self._running_ahead(), 1))

    def _open_rounds(self) -> list[Round]:
        return self._in_turn((*self._c.rounds.values(), *self._c.attached.values()))

    def _running_ahead(self) -> list[Round]:
        return self._in_turn(r for r in self._c.ahead.values() if not r.limit_reached)

    def _in_turn(self, rounds: Iterable[Round]) -> list[Round]:
        """Those with work, the one that was first least recently before the others, unless a run holds its turn."""
        turn = self._c.reservations.turn
        with_work = [r for r in rounds if r.run.suspended or r.run.queued]
        if len(with_work) < 2:
            return with_work
        return sorted(with_work, key=lambda r: (r.run is not turn, r.last_first))

    def _needs_no_prefill(self, sample: Sample) -> bool:
        pages = sample.kv.pages
        if pages is not None:
            return sample.length > 0 and self._resumes_on(pages, sample)
        return self._prompts.can_follow(sample)

    def _resumes_on(self, pages: Pages, sample: Sample) -> bool:
        return not self._why_recompute(sample, pages) and self._has_request(sample)

    def _why_recompute(self, sample: Sample, pages: Pages) -> Reason:
        """Why the sample does not resume on its stored KV (`kv-policy`); empty if it does."""
        run, age = sample.group.run, self._c.clock.version - sample.kv.version
        if run.kv == "auto":
            tier = "device" if pages.slots is not None else pages.tier
            return why_not_resume(self._c.rates, tier, pages.length, age, run.max_staleness)
        return "asked" if run.kv == "recompute" and age > 0 else ""

    def _has_request(self, sample: Sample) -> bool:
        """After a restart, a sample on recovered KV has no request until it resumes."""
        return sample.request is not None or self._c.engine.rebuild_request(sample)

    def _round(self, sample: Sample) -> Round:
        rnd = self._c.active_round(sample)
        assert rnd is not None, "a sample is admitted outside of its run's rounds"
        return rnd

    # --- by prefill

    def _start(self, samples: list[Sample]) -> None:
        samples = [s for s in samples if not self._waits_for_kv(s)]
        if samples:
            self._c.trace("start", samples)
        for sample in samples:
            if sample.kv.pages is not None and sample.length:
                sample.recompute.reason = self._why_recompute(sample, sample.kv.pages)
                self._tiers.release(sample)
            rnd = self._round(sample)
            stats, kv = rnd.stats, sample.group.run.kv
            stats.resumed_recomputed += sample.length > 0
            if sample.length and kv == "auto":
                stats.recomputed[sample.recompute.reason or "no_pages"] += 1
                stats.kv_fallback += not sample.recompute.reason
            elif sample.length and kv == "keep":
                stats.kv_fallback += 1
            self._prompts.prefill_queued(sample)
            self._enter(sample, rnd)
            sample.recompute.in_progress = sample.length > 0
            self._c.engine.start(sample, proximal=rnd.spec.proximal)

    def _enter(self, sample: Sample, rnd: Round) -> None:
        """Admit a sample on KV of the current policy."""
        rnd.stats.started += sample.length == 0
        self._c.ledger.admit(sample)
        if (leg := sample.group.leg) is not None and not leg.trajectory.begun:
            leg.trajectory.begun = True
            self._c.ledger.requeue(other.group for other in leg.trajectory.pending)
        sample.admitted_round = rnd.number
        self._c.recorder.admitted(sample)
        if sample.kv.pages is None or sample not in sample.group.run.parked:
            sample.kv.begin(self._c.clock.version)
        sample.open_span(self._c.clock.version, "recomputed" if sample.length else "fresh")

    def _waits_for_kv(self, sample: Sample) -> bool:
        """Whether a leg without tokens waits for the KV of an earlier leg, on which it is prefilled.

        It is prefilled as a whole after two loads, if nothing else runs that could free memory, or if stock requests
        have taken that memory for long.
        """
        engine, pages, leg = self._c.engine, sample.kv.pages, sample.group.leg
        if pages is None or sample.length or leg is None:
            return False
        if not self._why_recompute(sample, pages):
            if pages.ready:
                self._tiers.prepare_resume(sample)
                self._tiers.add_suspended([sample])  # it was among those of the tier to which it was being copied
                return False
            if pages.loading:
                return True
            if leg.loads < MAX_LEG_LOADS and self._tiers.load(sample):
                leg.loads += 1
                return True
            leg.overtaken += engine.foreign_waiting() > 0
            if leg.loads < MAX_LEG_LOADS and leg.overtaken < OVERTAKEN_STEPS and not engine.idle():
                self._demote_parked(pages.length + engine.page_size + engine.tokens_for_next_decode())
                return True
        self._tiers.release(sample)
        return False

    def _demote_parked(self, wanted: int) -> None:
        """Order copies of parked KV, in eviction order, until the pool will have `wanted` tokens."""
        engine, tiers = self._c.engine, self._tiers
        while engine.tokens_free() + tiers.transfers.tokens_being_freed() < wanted:
            victim = tiers.next_victim_on_device()
            if victim is None or victim.state is not State.PARKED:
                return
            tiers.demote(victim)

    # --- on stored pages

    def resume(self) -> bool:
        """Called where the step could launch a prefill; True if samples joined the batch instead."""
        engine, reservations = self._c.engine, self._c.reservations
        if not self._to_join and not reservations.stock_turn:
            reservations.release_loading()
        if not self._to_join or engine.mid_prefill():
            # A load takes pool tokens, and the next chunk of a prompt has none set aside.
            reservations.prefill_served()
            return False
        if reservations.prefill_owed and engine.first_waiting_need():
            reservations.prefill_served()
            reservations.hold_turn(self._to_join[0])
            return False
        # Since `admit` a round may have ended, or a run may have reached its limit: a full queue can abort a sample at
        # once, and memory pressure has the step in flight processed.
        waiting = [s for s in self._to_join if (r := self._c.active_round(s)) is not None and not r.limit_reached]
        joining = self._memory.select(waiting[: max(0, engine.row_slots())])
        self._to_join = []
        if not joining:
            return False
        joining.sort(key=lambda s: (s.queue_position < 0, s.queue_position))
        self._c.trace("resume", joining)
        for sample in joining:
            rnd = self._round(sample)
            if sample.state is State.QUEUED:
                self._enter(sample, rnd)
                rnd.stats.started_on_prompt_kv += 1
            else:
                self._resume_on_pages(sample, rnd)
        engine.attach(joining)
        reservations.owe_prefill()
        return True

    def _resume_on_pages(self, sample: Sample, rnd: Round) -> None:
        rnd.stats.resumed_kept += 1
        self._c.ledger.admit(sample)
        sample.admitted_round = rnd.number
        version = self._c.clock.version
        if sample.kv.version < version or sample.kv.quantized:
            sample.open_span(version, "kept")
        if sample.kv.version < version and sample.group.run.kv == "auto":
            rnd.stats.kept[_source_tier(sample)] += 1
        self._tiers.prepare_resume(sample)

    # --- ahead of a slot

    def _load_ahead(self, rounds: list[Round]) -> None:
        """While all slots are taken, load the next partials into memory that is to spare."""
        engine = self._c.engine
        if self._c.step % LOAD_AHEAD_INTERVAL or engine.mid_prefill() or engine.first_waiting_need():
            return
        budget = engine.prefill_budget() - engine.tokens_for_next_decode()
        for sample in pick(rounds, MAX_LOADED_AHEAD):
            pages = sample.kv.pages
            if pages is None or pages.slots is not None or not self._resumes_on(pages, sample):
                continue
            budget -= self._memory.need(sample)
            if budget <= 0 or not self._tiers.load(sample):
                return


def _source_tier(sample: Sample) -> Tier:
    """The tier from which a sample's pages came to the device."""
    pages = sample.kv.pages
    loaded = pages is not None and pages.state is KvState.DEVICE_WITH_COPY
    return pages.copy.tier if loaded and pages is not None and pages.copy is not None else "device"
