"""Step 2 and 9 of 9 (admit, resume): free slots go to partials, then to groups already begun, then to new groups.

A sample on stored pages, or on the KV of a prompt that another member of its group has brought, joins the running batch
as a plain decode row, in a step that launches no prefill; any other, or one whose round wants fresh KV, is prefilled
through SGLang's own waiting queue.
"""

from collections import Counter

from sglang_april.kv.cost_model import Reason, why_not_resume
from sglang_april.kv.kv_pages import Pages, Tier
from sglang_april.scheduler.admission import PrefillBatcher, pick
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.prompts import Prompts
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group, Sample, State
from sglang_april.scheduler.tiers import Tiers

AHEAD = 4
"""Partials at most that are loaded before there is a slot for them."""
AHEAD_EVERY = 8
"""Steps between two looks for such partials."""


class Resumer:
    def __init__(self, context: Context, tiers: Tiers) -> None:
        self._c = context
        self._tiers = tiers
        self._resumable: list[Sample] = []
        self._hold = False
        """A sample that has a slot waits for its pages or for room: the next turn is not taken before it has joined, or
        two runs could load in each other's room for ever."""
        self._turn = False
        self._joined = False
        """Samples joined the batch where a prefill could have been launched, and none could be since."""
        self._gathering = PrefillBatcher()
        self._prompts = Prompts(context)

    def admit(self) -> None:
        """Once per step: fill the free slots. Samples with KV come first and alone; they join in `resume`.

        The others gather for a prefill that they share, unless somebody else's is launched anyway.
        """
        self._resumable = []
        rounds = _with_work(self._c.rounds)
        ahead = self._running_ahead()
        if not rounds and not ahead:
            return
        slots = self._slots()
        if slots <= 0:
            self._load_ahead([*rounds, *ahead])
            return
        chosen = pick(rounds, slots)
        chosen += pick(ahead, slots - len(chosen))
        if not self._hold:
            for lanes in (self._c.rounds, self._c.ahead):
                _take_turns(lanes)
        self._hold = False
        self._resumable = [s for s in chosen if self._joins(s)]
        if self._resumable or all(self._prompts.waits(s) for s in chosen):
            return
        due = self._gathering.is_due([*rounds, *ahead], chosen, slots)
        if due or self._c.engine.foreign_waiting() or self._c.engine.mid_prefill():
            # Each lane keeps its share: what its leaders leave of it is for their followers.
            share = Counter(s.group.run for s in chosen)
            self._start(pick([*rounds, *ahead], slots, lambda rnd: self._prompts.starters(rnd, share[rnd.run])))

    def has_work(self) -> bool:
        """Whether the next step could start a sample: then an idle loop must not sleep until somebody writes to it.

        The end of a copy is such a message; until it comes there is nothing to do.
        """
        if len(self._tiers.moves) or not self._c.may_step():
            return False
        return bool(pick(_with_work(self._c.rounds), 1) or pick(self._running_ahead(), 1))

    def _running_ahead(self) -> list[Round]:
        return [r for r in _with_work(self._c.ahead) if not r.rests]

    def _slots(self) -> int:
        """Free slots, shared with stock requests that wait for one, so that both progress."""
        slots = self._c.engine.free_slots()
        strangers = self._c.engine.foreign_waiting()
        if slots <= 0 or not strangers:
            return slots
        if slots == 1:
            self._turn = not self._turn
            return int(self._turn)
        return slots - min(strangers, slots // 2)

    def _joins(self, sample: Sample) -> bool:
        """It needs no prefill."""
        return self._goes_on(sample, sample.pages) if sample.pages is not None else self._prompts.follows(sample)

    def _goes_on(self, sample: Sample, pages: Pages) -> bool:
        return not self._why_recompute(sample, pages) and self._has_request(sample)

    def _why_recompute(self, sample: Sample, pages: Pages) -> Reason:
        """Why the sample does not go on on its stored KV (S6); empty where it does."""
        spec, age = self._round(sample).spec, self._c.clock.version - sample.kv_version
        if spec.kv == "auto":
            tier = "device" if pages.slots is not None else pages.tier
            return why_not_resume(self._c.rates, tier, pages.length, age, spec.max_staleness)
        return "asked" if spec.kv == "recompute" and age > 0 else ""

    def _has_request(self, sample: Sample) -> bool:
        """Pages that outlived the last server have none until somebody needs them."""
        return sample.request is not None or self._c.engine.revive(sample)

    def _round(self, sample: Sample) -> Round:
        rnd = self._c.active_round(sample)
        assert rnd is not None, "a sample is admitted outside of its run's rounds"
        return rnd

    # --- by prefill

    def _start(self, samples: list[Sample]) -> None:
        self._c.trace("start", samples)
        for sample in samples:
            if sample.pages is not None:
                sample.recompute_reason = self._why_recompute(sample, sample.pages)
                self._tiers.release(sample)
            rnd = self._round(sample)
            stats = rnd.stats
            stats.resumed_recomputed += sample.length > 0
            if sample.length and rnd.spec.kv == "auto":
                stats.recomputed[sample.recompute_reason or "no_pages"] += 1
                stats.kv_fallback += not sample.recompute_reason
            elif sample.length and rnd.spec.kv == "keep":
                stats.kv_fallback += 1
            self._prompts.starts(sample)
            self._enter(sample, rnd)
            sample.recomputing = sample.length > 0
            self._c.engine.start(sample, proximal=rnd.spec.proximal)

    def _enter(self, sample: Sample, rnd: Round) -> None:
        """It goes on, or begins, on KV of the current policy."""
        rnd.stats.started += sample.length == 0
        self._c.ledger.admit(sample)
        sample.admitted_round = rnd.number
        self._c.recorder.admitted(sample)
        sample.kv_version = self._c.clock.version
        sample.open_span(sample.kv_version, "recomputed" if sample.length else "fresh")

    # --- on stored pages

    def resume(self) -> bool:
        """At the point of the step where a prefill could be launched; True if samples joined the batch instead."""
        engine = self._c.engine
        if not self._resumable:
            self._tiers.expected = []
        if not self._resumable or engine.mid_prefill():
            # What loads takes room, and the next chunk of a prompt has none set aside.
            self._joined = False
            return False
        if self._joined and engine.first_waiting_need():
            # Whoever waits for a prefill, also after a retract, has every second step.
            self._joined, self._hold = False, True
            return False
        # A round may have ended since `admit`: a full queue can give a sample up at once.
        wanted = [s for s in self._resumable if self._c.active_round(s) is not None]
        taken = self._fit(wanted[: max(0, engine.row_slots())])
        self._resumable = []
        if not taken:
            return False
        taken.sort(key=lambda s: (s.order < 0, s.order))
        self._c.trace("resume", taken)
        version = self._c.clock.version
        for sample in taken:
            rnd = self._round(sample)
            if sample.state is State.QUEUED:
                self._enter(sample, rnd)
                rnd.stats.started_on_prompt_kv += 1
                continue
            rnd.stats.resumed_kept += 1
            self._c.ledger.admit(sample)
            sample.admitted_round = rnd.number
            if sample.kv_version < version:
                sample.open_span(version, "kept")
                if rnd.spec.kv == "auto":
                    rnd.stats.kept[_came_from(sample)] += 1
            self._tiers.resumed(sample)
        engine.attach(taken)
        self._joined = True
        return True

    def _fit(self, samples: list[Sample]) -> list[Sample]:
        """The first of `samples` that fit SGLang's prefill budget and are on the device; others begin to load.

        One at least fits when nothing else runs; then all that are loading are waited for, and join together. The
        budget counts on a part of what running samples may still write; the decode of this very step is certain.
        """
        engine = self._c.engine
        taken: list[Sample] = []
        loading: list[Sample] = []
        unfit: set[Group] = set()
        before, self._tiers.expected = self._tiers.expected, loading
        budget = min(engine.prefill_budget(), engine.tokens_free() - engine.tokens_for_next_decode())
        for sample in samples:
            need = self._need(sample)
            if need >= budget:
                if taken or loading or not engine.idle():
                    break
                if not self._clear_the_way(sample, need):
                    self._hold = True
                    break
            if sample.pages is None:
                if sample.group in unfit:
                    continue
                alone = not taken and not loading and engine.idle()
                cost = self._prompts.give_pages(sample, need if alone else budget - need)
                if cost is None:
                    unfit.add(sample.group)
                    continue
                budget -= cost
            if sample.pages is None or sample.pages.ready:
                taken.append(sample)
            elif sample.pages.loading or self._tiers.load(sample):
                loading.append(sample)
            else:
                break
            budget -= need
        self._hold |= bool(loading)
        if loading and engine.idle():
            self._prompts.take_back(taken)
            taken = []
        loading += [s for s in before if s in samples and s not in taken and s not in loading]
        return taken

    def _need(self, sample: Sample) -> int:
        need = self._c.engine.remaining_estimate(sample)
        if sample.pages is None and self._c.engine.idle():
            # Nobody stands on its prompt, and the way is cleared for all of it.
            need += len(sample.group.prompt.input_ids) // 4
        elif sample.pages is not None and sample.pages.slots is None:
            need += sample.pages.length + self._c.engine.page_size
        return need

    def _clear_the_way(self, sample: Sample, need: int) -> bool:
        """Nothing runs and the first partial does not fit: the other partials' pages give way.

        Returns whether the sample may go on; while slots are on their way out, it waits for them.
        """
        while self._c.engine.prefill_budget() <= need:
            if self._c.engine.prefill_budget() + self._tiers.moves.leaving_tokens(other_than=sample) > need:
                return False
            other = self._tiers.first_on_device(besides=(sample,)) or self._tiers.moves.last_loading(other_than=sample)
            if other is None:
                return self._tiers.moves.leaving_tokens(other_than=sample) == 0
            self._tiers.demote(other)
        return True

    # --- ahead of a slot

    def _load_ahead(self, rounds: list[Round]) -> None:
        """While all slots decode, the partials that are next come to the device, if there is room to spare."""
        engine = self._c.engine
        if self._c.step % AHEAD_EVERY or engine.mid_prefill() or engine.first_waiting_need():
            return
        budget = engine.prefill_budget() - engine.tokens_for_next_decode()
        for sample in pick(rounds, AHEAD):
            if sample.pages is None or sample.pages.slots is not None or not self._goes_on(sample, sample.pages):
                continue
            budget -= self._need(sample)
            if budget <= 0 or not self._tiers.load(sample):
                return


def _came_from(sample: Sample) -> Tier:
    """Where the pages under it were before it joined."""
    pages = sample.pages
    return pages.copy.tier if pages is not None and pages.copy is not None and not pages.leaving else "device"


def _with_work(lanes: dict[str, Round]) -> list[Round]:
    return [r for r in lanes.values() if r.run.suspended or r.run.begun or r.run.new]


def _take_turns(lanes: dict[str, Round]) -> None:
    """Round-robin: another run is first next time."""
    if len(lanes) > 1:
        name, rnd = next(iter(lanes.items()))
        del lanes[name]
        lanes[name] = rnd
