"""Shares a prompt's KV within its group: one member, the leader, is prefilled; the others follow on its KV.

A follower joins the running batch as a decode row whose input is the prompt's last token. It needs no prefill and
stalls no other sample. So a prefill covers one sample in `n`, and the samples that wait for a prefill are the leaders
of as many groups as fill one batch.
"""

from collections.abc import Iterator
from itertools import islice

from sglang_april.scheduler.admission import candidates, places
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group, Sample, State


class PromptSharing:
    def __init__(self, context: Context) -> None:
        self._c = context

    def can_follow(self, sample: Sample) -> bool:
        """The sample has no token, and its prompt has been prefilled under the current policy."""
        return sample.state is State.QUEUED and sample.group.prompt_version == self._c.clock.version

    def awaits_leader(self, sample: Sample) -> bool:
        """The sample's prompt is being prefilled: it can follow afterwards."""
        return sample.state is State.QUEUED and _has_leader(sample.group)

    def select_for_prefill(self, rnd: Round, slots: int) -> Iterator[Sample]:
        """At most `slots` samples to prefill; one per group whose other members can follow.

        Followers take the slots that become free next, so leaders may be selected for as many samples as run at once.
        More leaders would only begin groups early.
        """
        return islice(self._select(rnd, rnd.run.running + places(rnd, slots)), slots)

    def _select(self, rnd: Round, samples_left: int) -> Iterator[Sample]:
        led: set[Group] = set()
        for sample in candidates(rnd):
            group = sample.group
            if sample.length or not self._c.engine.shares_prompt(group):
                samples_left -= 1
            elif group in led or _has_leader(group) or self.can_follow(sample):
                continue
            else:
                led.add(group)
                samples_left -= group.counts[State.QUEUED]
            yield sample
            if samples_left <= 0:
                return

    def prefill_queued(self, sample: Sample) -> None:
        """Note that the sample enters the engine for a prefill."""
        if not sample.length and self._c.engine.shares_prompt(sample.group):
            sample.group.leader, sample.group.prompt_version = sample, -1

    @staticmethod
    def prefilled(sample: Sample) -> None:
        """Note that a prefill has produced the sample's next token: the engine now has the prompt's KV."""
        group = sample.group
        if group.leader is sample:
            group.leader, group.prompt_version = None, sample.kv.version

    def take_prompt_kv(self, sample: Sample, budget: int) -> int | None:
        """Give a follower the pages of its prompt.

        Returns:
            The pool tokens that this makes unevictable. None, and nothing changes, if they exceed `budget`, or if the
            engine no longer has the KV; another member then leads.
        """
        free = self._c.engine.tokens_free()
        if not self._c.engine.follow(sample):
            sample.group.prompt_version = -1
            return None
        cost = free - self._c.engine.tokens_free()
        if cost > budget:
            self._c.engine.forget(sample)
            return None
        return cost

    def return_prompt_kv(self, samples: list[Sample]) -> None:
        """Take the pages from the followers among `samples`, because they do not join in this step."""
        for sample in samples:
            if sample.state is State.QUEUED:
                self._c.engine.forget(sample)


def _has_leader(group: Group) -> bool:
    leader = group.leader
    return leader is not None and leader.state is State.RUNNING and not leader.length
