"""Pool memory for samples that join the running batch without a prefill, on stored KV or on that of their prompt."""

from sglang_april.scheduler.context import Context
from sglang_april.scheduler.prompts import PromptSharing
from sglang_april.scheduler.state import Group, Sample
from sglang_april.scheduler.tiers import Tiers

OVERTAKEN_STEPS = 256
"""How long a sample on stored KV waits for memory while stock requests wait as well."""


class JoinMemory:
    def __init__(self, context: Context, tiers: Tiers, prompts: PromptSharing) -> None:
        self._c, self._tiers, self._prompts = context, tiers, prompts
        self._overtaken: Sample | None = None
        """The sample that found no memory when a sample last found none."""
        self._overtaken_since = self._overtaken_last = 0
        """The first and the last such step of it."""

    def select(self, samples: list[Sample]) -> list[Sample]:
        """The first of `samples` that fit SGLang's prefill budget and are on the device; others begin to load.

        At least one fits when nothing else runs; then all that are loading are waited for, and join together. SGLang's
        budget counts only part of what running samples may still write, but the decode of this step is certain.
        """
        engine = self._c.engine
        joining: list[Sample] = []
        loading: list[Sample] = []
        without_prompt_kv: set[Group] = set()
        budget = min(engine.prefill_budget(), engine.tokens_free() - engine.tokens_for_next_decode())
        for sample in samples:
            need = self.need(sample)
            if need >= budget:
                if joining or loading or self._waits_for_memory(sample):
                    break
                if not self._evict_others(sample, need):
                    self._c.reservations.hold_turn(sample)
                    break
            pages = sample.kv.pages
            if pages is None:
                if sample.group in without_prompt_kv:
                    continue
                alone = not joining and not loading and engine.idle()
                cost = self._prompts.take_prompt_kv(sample, need if alone else budget - need)
                if cost is None:
                    without_prompt_kv.add(sample.group)
                    continue
                budget -= cost
            if pages is None or pages.ready:
                joining.append(sample)
            elif pages.loading or self._tiers.load(sample):
                loading.append(sample)
            else:
                break
            budget -= need
        if loading:
            self._c.reservations.hold_turn(loading[0])
        if loading and engine.idle():
            self._prompts.return_prompt_kv(joining)
            joining = []
        self._c.reservations.reserve_loading(loading, [s for s in samples if s not in joining])
        return joining

    def _waits_for_memory(self, sample: Sample) -> bool:
        """Whether running requests will free memory for the sample that is next, but stock requests may take it.

        After many such steps the sample does without its KV: for a prefill it takes its turn in SGLang's queue, which
        no later request leaves before it (`fair-slots`).
        """
        c = self._c
        if c.engine.idle():
            return False
        again = self._overtaken is sample and c.step - self._overtaken_last < OVERTAKEN_STEPS
        self._overtaken, self._overtaken_last = sample, c.step
        if not again or not c.engine.foreign_waiting():
            self._overtaken_since = c.step
        elif c.step - self._overtaken_since >= OVERTAKEN_STEPS and sample.kv.pages is not None:
            c.trace("give up KV", [sample])
            self._tiers.release(sample)
        return True

    def need(self, sample: Sample) -> int:
        """Pool tokens that the sample takes from the budget if it joins."""
        need, pages = self._c.engine.remaining_estimate(sample), sample.kv.pages
        if pages is None and self._c.engine.idle():
            # No running sample holds the prompt's KV: room is made for all of it.
            need += len(sample.group.prompt.input_ids) // 4
        elif pages is not None and pages.slots is None:
            need += pages.length + self._c.engine.page_size
        return need

    def _evict_others(self, sample: Sample, need: int) -> bool:
        """Nothing runs and the first sample does not fit: demote the pages of the other partials.

        Returns whether the sample may join or load now; False while copies in flight are about to free enough.
        """
        engine, transfers = self._c.engine, self._tiers.transfers
        while engine.prefill_budget() <= need:
            if engine.prefill_budget() + transfers.tokens_being_freed(excluding=sample) > need:
                return False
            other = self._tiers.next_victim_on_device(excluding=(sample,)) or transfers.last_loading(excluding=sample)
            if other is None:
                return transfers.tokens_being_freed(excluding=sample) == 0
            self._tiers.demote(other)
        return True
