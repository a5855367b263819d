"""Step 2 of 9 (admit): a group's prompt is prefilled once, for its leader; the other members follow on its KV.

A follower joins the running batch as a decode row whose input is the prompt's last token: it needs no prefill, stalls
nobody, and waits for nobody. So a prefill is launched for one sample in `n`, and what gathers for it are leaders, of as
many groups as make one batch.
"""

from collections.abc import Iterator
from itertools import islice

from sglang_april.scheduler.admission import candidates, places
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.state import Group, Sample, State


class Prompts:
    def __init__(self, context: Context) -> None:
        self._c = context

    def follows(self, sample: Sample) -> bool:
        """It has no token, and its prompt has been computed under the current policy."""
        return sample.state is State.QUEUED and sample.group.prompt_version == self._c.clock.version

    def waits(self, sample: Sample) -> bool:
        """Its prompt is being computed: it will follow."""
        return sample.state is State.QUEUED and _is_led(sample.group)

    def starters(self, rnd: Round, slots: int) -> Iterator[Sample]:
        """At most `slots` samples that are to be prefilled, of groups whose members can follow the first only.

        Their followers take the slots that come free next, so there may be as many as run at once; more would only be
        groups begun early.
        """
        return islice(self._starters(rnd, rnd.run.running + places(rnd, slots)), slots)

    def _starters(self, rnd: Round, room: int) -> Iterator[Sample]:
        led: set[Group] = set()
        for sample in candidates(rnd):
            group = sample.group
            if sample.length or not self._c.engine.shares_prompt(group):
                room -= 1
            elif group in led or _is_led(group) or self.follows(sample):
                continue
            else:
                led.add(group)
                room -= group.counts[State.QUEUED]
            yield sample
            if room <= 0:
                return

    def starts(self, sample: Sample) -> None:
        """It enters the engine for a prefill."""
        if not sample.length and self._c.engine.shares_prompt(sample.group):
            sample.group.leader, sample.group.prompt_version = sample, -1

    @staticmethod
    def prefilled(sample: Sample) -> None:
        """A prefill has given it its next token: the engine has what it is to keep of it."""
        group = sample.group
        if group.leader is sample:
            group.leader, group.prompt_version = None, sample.kv_version

    def give_pages(self, sample: Sample, spare: int) -> int | None:
        """Put a follower on its prompt's KV, which costs the tokens that the tree could have let go until now.

        None, and nothing changed, if they are more than `spare`, or where the engine does not have that KV any more:
        then another leads.
        """
        free = self._c.engine.tokens_free()
        if not self._c.engine.follow(sample):
            sample.group.prompt_version = -1
            return None
        cost = free - self._c.engine.tokens_free()
        if cost > spare:
            self._c.engine.forget(sample)
            return None
        return cost

    def take_back(self, samples: list[Sample]) -> None:
        """Followers among them, who have been given pages, do not join now."""
        for sample in samples:
            if sample.state is State.QUEUED:
                self._c.engine.forget(sample)


def _is_led(group: Group) -> bool:
    leader = group.leader
    return leader is not None and leader.state is State.RUNNING and not leader.length
