"""The scheduler side of the plugin: commands in, decisions at step boundaries, events out.

The adapter calls `command` and `observe` for broadcast messages, `before_step` at the top of every scheduling step,
`resume` where a prefill could be launched, `progress` after each step's results, and the methods under
"interruptions" around SGLang's own calls. All of them run on every TP rank with the same input (`rank-determinism`).

What a method has changed goes to the journal at its end or at the next `before_step`. If it raises, the server ends and
the next one continues from the journal (`fail-stop`).
"""

from collections.abc import Iterable
from typing import Any

from sglang_april.api import messages
from sglang_april.api.errors import RequestError
from sglang_april.recovery.journal_snapshot import JournalSnapshot
from sglang_april.scheduler.attached import Attached
from sglang_april.scheduler.commands import Commands
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.prompts import PromptSharing
from sglang_april.scheduler.pushes import Interrupter
from sglang_april.scheduler.restore import FindKv, recover_kv, restore
from sglang_april.scheduler.resume import Resumer
from sglang_april.scheduler.round_end import RoundEnd
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Group, Sample, State
from sglang_april.scheduler.suspend import Suspender
from sglang_april.scheduler.tiers import Tiers

COUNT_EVERY = 16
"""Steps between two counts of a sample that only decodes."""

Progress = tuple[Sample, int, int, bool]
"""The result of one step for one sample: (sample, output tokens so far, tokens prefilled in this step, finished)."""


class Controller:
    def __init__(self, context: Context) -> None:
        self.context = context
        self._may_step = False
        """Whether rollout samples may take this step."""
        self._counted = 0
        """The step in which all samples were last counted."""
        self.tiers = Tiers(context)
        self.suspender = Suspender(context, self.tiers)
        self.resumer = Resumer(context, self.tiers)
        self.attached = Attached(context, self.suspender, self.tiers)
        ends = self.attached.trajectory_ends
        self.round_end = RoundEnd(context, self.suspender, self.tiers, ends)
        self._pushes = Interrupter(context, self.suspender, self.round_end)
        self._commands = Commands(context, self.suspender, self.round_end, self._pushes, self.tiers, ends)

    def restore(self, saved: JournalSnapshot, find_kv: FindKv | None = None) -> None:
        """After a restart, before anything else: restore the journal's state and the KV that `find_kv` finds."""
        restore(self.context, saved)
        if find_kv is not None:
            recover_kv(self.context, self.tiers, find_kv)
        self.round_end.mark_due()

    # --- commands

    def command(self, cmd: messages.Command) -> None:
        """Carry out one broadcast message and answer it (`refusal-changes-nothing`).

        Rounds that are over end first, and rounds that the message ends do so at once: a pause stops the steps.
        """
        self.round_end.end_due()
        self.context.recorder.commit()  # the command's own records fail its answer, and no others
        try:
            data = self._commands.execute(cmd)
            answer = messages.Answer(cmd.seq, data=data) if data is not None else None
        except RequestError as error:
            answer = messages.Answer(cmd.seq, error.status, error.field, error.reason)
        if answer is not None:
            lasting = isinstance(cmd, messages.Lasting) and answer.status == 200
            self.context.recorder.answer(answer, lasting=lasting)
        self.round_end.end_due()
        self.context.recorder.commit()

    def observe(self, observation: messages.Observation) -> None:
        """Apply what a rank observed outside of a step; broadcast, so that all ranks apply it alike."""
        match observation:
            case messages.Moved():
                self.tiers.orders_ended(observation)
            case messages.Tuned():
                self.context.apply_tuning(observation)
            case messages.Rates():
                self.context.rates = observation

    # --- interruptions

    def interrupt(self) -> None:
        """Before weights change, a flush or a release: take all samples out (`suspend-before-interrupt`)."""
        self._pushes.interrupt()
        self.context.recorder.commit()

    def evacuate(self) -> None:
        """After `interrupt`, before the KV pool is cleared or unmapped (`evacuate-before-clear`)."""
        self.suspender.evacuate()

    def weight_call_ended(
        self, ok: bool, message: str, *, whole: bool, refused: bool = False, named: int | None = None
    ) -> None:
        """One of SGLang's weight calls has been applied, has failed on some rank, or was refused unchanged.

        `named`: the policy version that it names, if it names one.
        """
        self._pushes.weight_call_ended(ok, message, whole=whole, refused=refused, named=named)
        self.context.recorder.commit()

    def session_begun(self) -> None:
        """SGLang's `begin_weight_update`: the weight calls up to its end are one push, if none is open."""
        self._pushes.session_begun()
        self.context.recorder.commit()

    def session_ended(self) -> str:
        """SGLang's `end_weight_update`; returns why the version has not moved, or an empty string."""
        problem = self._pushes.session_ended()
        self.context.recorder.commit()
        return problem

    def weights_lost(self) -> None:
        """A release of memory has dropped the weights, or they were reset to random values."""
        self._pushes.weights_lost()

    def freeze(self) -> None:
        """Begin a pause: no rollout sample takes a step until `thaw`."""
        self._pushes.freeze()
        self.context.recorder.commit()

    def thaw(self) -> None:
        """End the pause."""
        self._pushes.thaw()

    def abort_everything(self) -> None:
        """SGLang's abort of all requests ends open rounds."""
        self._pushes.abort_everything()
        self.context.recorder.commit()

    # --- steps

    def before_step(self) -> None:
        """Top of a scheduling step: end rounds that are over, relieve memory pressure, fill free slots."""
        c = self.context
        c.step += 1
        self.round_end.end_due()
        self._may_step = c.may_have_work() and c.may_step()
        if not self._may_step:
            c.reservations.release_loading()
            if c.attached:
                self.attached.keep_suspended()
        if c.ledger.runs:
            self.suspender.relieve_pressure()
        if self._may_step:
            self.resumer.admit()
            self.round_end.end_due()  # a full queue may have aborted a sample at once
            for rnd in c.rounds.values():
                rnd.stats.timeline.note(rnd.run.running)
        c.recorder.commit()

    def resume(self) -> bool:
        """Where this step could launch a prefill; True if samples joined the batch instead."""
        return self._may_step and self.resumer.resume()

    def launched(self, sample: Sample, *, on_kv: bool) -> None:
        """The prefill of a leg is launched that holds the KV of an earlier one; `on_kv`: behind that KV."""
        version = self.context.clock.version
        self.context.trace("launch on KV" if on_kv else "launch", [sample])
        if on_kv:
            self.tiers.prepare_resume(sample)
            old = sample.kv.version < version or sample.kv.quantized
            sample.open_span(version, "kept" if old else "fresh")
            self.context.engine.hand_over(sample)
            self.context.ledger.unpark(sample)
        else:
            self.tiers.release(sample)
            sample.open_span(version, "fresh")

    def has_work(self) -> bool:
        return self.resumer.has_work()

    # --- results of a step

    def counts_all(self) -> bool:
        """Whether `progress` gets all samples of a step that only decodes. Called once for each such step."""
        step = self.context.step
        if step - self._counted < COUNT_EVERY:
            return False
        self._counted = step
        return True

    def progress(self, steps: Iterable[Progress]) -> None:
        """Count tokens and finishes; finished samples leave the scheduler at once.

        `steps` has every sample that was prefilled or has finished. The others are counted in some steps only
        (`counts_all`), because to look at each in every step is the largest part of the bookkeeping, and before their
        tokens matter (`Context.count`).
        """
        done: list[messages.FinishedSample] = []
        ended: list[Sample] = []
        run: Run | None = None
        tokens, interval = 0, self.context.recorder.interval
        for sample, length, prefilled, finished in steps:
            drawn, group = length - sample.length, sample.group
            if group.run is not run:
                if run is not None:
                    self.context.count_tokens(run, tokens)
                run, tokens = group.run, 0
            tokens += drawn
            recompute = sample.recompute
            if prefilled or recompute.in_progress or recompute.reason or group.first_round < 0:
                self._prefilled(sample, drawn, prefilled)
            sample.length = length
            if finished and sample.attached:
                ended.append(sample)
            elif finished:
                done.append(self._finish(sample, None))
            elif interval and _is_due(sample, interval):
                self.context.recorder.drawn(sample)
        if run is not None:
            self.context.count_tokens(run, tokens)
        if ended:
            self.attached.end(ended)
        if done:
            self._announce(done)

    def _prefilled(self, sample: Sample, drawn: int, prefilled: int) -> None:
        """A step other than a plain decode: it computed KV of the sample, or drew the first token of its group."""
        group, recompute = sample.group, sample.recompute
        if recompute.in_progress:
            if rnd := self.context.active_round(sample):
                rnd.stats.reprefilled_tokens += prefilled
            recompute.in_progress = drawn <= 0
        if drawn > 0:
            recompute.reason = ""
            if prefilled:
                PromptSharing.prefilled(sample)
            if group.first_round < 0:
                self._first_token(sample, group)
        if group.leg is not None:
            group.leg.prefilled += 0 if sample.length else prefilled

    def aborted(self, sample: Sample, reason: dict[str, Any]) -> None:
        """The engine ended the sample outside of a step (queue limit, out of memory): deliver it (`delivered-once`)."""
        self.context.count([sample])
        if sample.attached:
            self.attached.end([sample], reason)
        elif sample.state is State.RUNNING:
            self._announce([self._finish(sample, reason)])

    def retracted(self, sample: Sample) -> None:
        """SGLang has freed the sample's KV and queues it for another prefill."""
        version = self.context.clock.version
        self.context.count([sample])
        self.context.trace("retract", [sample])
        self.tiers.drop_prefix(sample)
        sample.kv.begin(version)
        sample.recompute.in_progress = sample.length > 0
        sample.open_span(version, "recomputed" if sample.length else "fresh")
        rnd = self.context.active_round(sample)
        self.context.engine.collect_proximal(sample, wanted=rnd is not None and rnd.spec.proximal)
        if rnd is not None:
            rnd.stats.retracted += 1

    def _first_token(self, sample: Sample, group: Group) -> None:
        """Running ahead counts as the next round, the earliest that can deliver these tokens."""
        run = group.run
        group.first_round = run.rounds_opened + (run.key not in self.context.rounds)
        if group.leg is not None and not self.context.engine.refused(sample):
            self.attached.first_token(group.leg.trajectory, sample)

    def _finish(self, sample: Sample, reason: dict[str, Any] | None) -> messages.FinishedSample:
        self.context.trace("finish", [sample])
        self.tiers.drop_prefix(sample)
        result = self.context.engine.finished(sample, reason)
        self.context.ledger.finish(sample, self.context.step)
        result.whole = sample.group.whole
        if rnd := self.context.round_of(sample):
            result.round_id = rnd.spec.round_id
        self.context.recorder.finished(sample, result)
        return result

    def _announce(self, done: list[messages.FinishedSample]) -> None:
        self.round_end.mark_due()
        self.context.recorder.announced(messages.Finished(done))
        for rnd in self.context.rounds.values():
            if rnd.ends_now():
                self.context.quota_met(rnd)


def _is_due(sample: Sample, interval: int) -> bool:
    """Whether the journal gets the sample's new tokens: not all samples at one count."""
    phase = COUNT_EVERY * sample.queue_position
    return (sample.length + phase) // interval > (sample.journal.tokens + phase) // interval
