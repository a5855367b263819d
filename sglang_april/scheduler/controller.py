"""Steps 2 to 6 and 9 on one scheduler: commands in, decisions at step boundaries, events out. Ties the parts together.

The adapter calls `command` for each broadcast message, `before_step` at the top of every scheduling step, `resume`
where a prefill could be launched, and `progress` after each step's results. All four run on every TP rank with the same
input.
"""

from collections.abc import Iterable
from typing import Any

from sglang_april.api import messages
from sglang_april.api.errors import RequestError
from sglang_april.recovery.journal_snapshot import Saved
from sglang_april.scheduler.commands import Commands
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.prompts import Prompts
from sglang_april.scheduler.pushes import Pushes
from sglang_april.scheduler.restore import Look, regain, restore
from sglang_april.scheduler.resume import Resumer
from sglang_april.scheduler.round_end import RoundEnd
from sglang_april.scheduler.state import Group, Run, Sample, State
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers

Progress = tuple[Sample, int, int, bool]
"""What one step did to one of our samples: its output tokens now, how many tokens a prefill computed (0 in a decode
step), whether it has finished. A plain tuple: one is made for every running sample in every step."""


class Controller:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.tiers = Tiers(context)
        self.suspender = Suspender(context, self.tiers)
        self.resumer = Resumer(context, self.tiers)
        self.endings = RoundEnd(context, self.suspender, self.tiers)
        self.pushes = Pushes(context, self.suspender, self.endings)
        self._commands = Commands(context, self.suspender, self.endings, self.pushes, self.tiers)

    def restore(self, saved: Saved, look: Look | None = None) -> None:
        """After a restart, before anything else: what a journal holds, and the KV that `look` finds."""
        restore(self.context, saved)
        if look is not None:
            regain(self.context, self.tiers, look)
        self.endings.look()

    # --- commands

    def command(self, cmd: messages.Command) -> None:
        """Carry out one broadcast message and answer it; a refusal changes nothing.

        Rounds that are over end first, and those that the message ends end at once: under a pause there are no steps.
        """
        self.endings.end_due()
        try:
            data = self._commands.carry_out(cmd)
            answer = messages.Answer(cmd.seq, data=data) if data is not None else None
        except RequestError as no:
            answer = messages.Answer(cmd.seq, no.status, no.field, no.reason)
        if answer is not None:
            self.context.recorder.answer(answer, lasting=isinstance(cmd, messages.Lasting))
        self.endings.end_due()
        self.context.recorder.commit()

    def observe(self, fact: messages.Fact) -> None:
        """What some rank has seen outside of a step, broadcast, so that it takes effect on all alike (S9)."""
        match fact:
            case messages.Moved():
                self.tiers.moved(fact)
            case messages.Tuned():
                self.context.tune(fact)
            case messages.Rates():
                self.context.rates = fact

    # --- steps

    def before_step(self) -> None:
        """Top of a scheduling step: end what is over, make room, fill free slots."""
        c = self.context
        c.step += 1
        self.endings.end_due()
        if not c.rounds or not c.may_step():
            self.tiers.expected = []
        if c.ledger.runs:
            self.suspender.relieve()
        if (c.rounds or c.ahead) and c.may_step():
            self.resumer.admit()
            self.endings.end_due()  # a full queue may have given a sample up at once
            for rnd in c.rounds.values():
                rnd.stats.timeline.note(rnd.run.running)
        c.recorder.commit()
        c.write_digest()

    def resume(self) -> bool:
        return self.context.may_step() and self.resumer.resume()

    def has_work(self) -> bool:
        return self.resumer.has_work()

    # --- results of a step

    def progress(self, steps: Iterable[Progress]) -> None:
        """Step 3: count tokens and finishes; finished samples leave at once."""
        done: list[messages.FinishedSample] = []
        run, tokens = None, 0
        for sample, length, prefilled, finished in steps:
            drawn, group = length - sample.length, sample.group
            if group.run is not run:
                self._count(run, tokens)
                run, tokens = group.run, 0
            tokens += drawn
            if sample.recomputing:
                if rnd := self.context.active_round(sample):
                    rnd.stats.reprefilled_tokens += prefilled
                sample.recomputing = drawn <= 0
            if drawn > 0:
                sample.recompute_reason = ""
                if prefilled:
                    Prompts.prefilled(sample)
                if group.first_round < 0:
                    self._note_first_round(group)
            sample.length = length
            if finished:
                done.append(self._finish(sample, None))
        self._count(run, tokens)
        self._announce(done)

    def _count(self, run: Run | None, tokens: int) -> None:
        """Output tokens of one step, for the figures of the round under which they were drawn."""
        rnd = self.context.active_round_of(run.name) if run is not None else None
        if rnd is not None:
            rnd.stats.tokens_generated += tokens
            if rnd.stats.t_quota_met is not None:
                rnd.stats.tokens_after_quota += tokens

    def aborted(self, sample: Sample, reason: dict[str, Any]) -> None:
        """The engine gave the sample up outside of a step (queue limit, out of memory, …): delivered as such (S3)."""
        if sample.state is State.RUNNING:
            self._announce([self._finish(sample, reason)])

    def retracted(self, sample: Sample) -> None:
        """SGLang took the sample's KV and queues it for another prefill."""
        version = self.context.clock.version
        self.tiers.left(sample)
        sample.kv_version, sample.recomputing = version, sample.length > 0
        sample.open_span(version, "recomputed" if sample.length else "fresh")
        if rnd := self.context.active_round(sample):
            rnd.stats.retracted += 1

    def _note_first_round(self, group: Group) -> None:
        """What runs ahead of a round belongs to it: its tokens are delivered there at the earliest."""
        run = group.run
        group.first_round = run.rounds_opened + (run.name not in self.context.rounds)

    def _finish(self, sample: Sample, reason: dict[str, Any] | None) -> messages.FinishedSample:
        self.tiers.left(sample)
        result = self.context.engine.finished(sample, reason)
        self.context.ledger.finish(sample, self.context.step)
        result.whole = sample.group.whole
        if rnd := self.context.round_of(sample):
            result.round_id = rnd.spec.round_id
        self.context.recorder.finished(sample, result)
        return result

    def _announce(self, done: list[messages.FinishedSample]) -> None:
        if not done:
            return
        self.endings.look()
        self.context.recorder.send(messages.Finished(done))
        for rnd in self.context.rounds.values():
            if rnd.ends_now():
                rnd.stats.quota_met()
