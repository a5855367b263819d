"""Steps 2 to 6 and 9 on one scheduler: commands in, decisions at step boundaries, events out.

The adapter calls `command` for each broadcast message, `before_step` at the top of every scheduling step, `resume`
where a prefill could be launched, and `progress` after each step's results. All four run on every TP rank with the same
input.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_april import wire
from sglang_april.policy.push import Refused
from sglang_april.scheduler import report
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.resume import Resumer
from sglang_april.scheduler.suspend import Suspender
from sglang_april.types import Sample, State


class Progress(NamedTuple):
    """What one step did to one of our samples."""

    sample: Sample
    length: int
    """Output tokens now."""
    prefilled: int
    """Tokens computed by a prefill in this step; 0 in a decode step."""
    finished: bool


class Controller:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.suspender = Suspender(context)
        self.resumer = Resumer(context, self.suspender)
        self._dirty = False
        """Something happened that may end a round."""

    # --- commands

    def command(self, cmd: wire.Command) -> None:
        """Carry out one broadcast message and answer it; a refusal changes nothing.

        Rounds that are over end first, and those that the message ends end at once: under a pause there are no steps.
        """
        self._end_due()
        try:
            data = self._carry_out(cmd)
            answer = wire.Answer(cmd.seq, data=data or {})
        except Refused as no:
            answer = wire.Answer(cmd.seq, no.status, no.field, no.reason)
        self.context.engine.send(answer)
        self._end_due()

    def _carry_out(self, cmd: wire.Command) -> dict[str, Any] | None:
        match cmd:
            case wire.OpenRound():
                return self._open(cmd)
            case wire.StopRound():
                return self._stop(cmd)
            case wire.Drop():
                return self._drop(cmd)
            case wire.PushBegin():
                self.push_begin(cmd.version)
            case wire.PushEnd():
                return self._push_end(cmd.version)
            case wire.Freeze():
                self.freeze()
            case wire.Thaw():
                self.thaw()
            case wire.GetState():
                return report.state(self.context)
            case wire.GetPartials():
                return {"partials": report.partials(self.context, cmd.run)}
        return None

    def _open(self, cmd: wire.OpenRound) -> dict[str, Any]:
        c = self.context
        if reason := c.closed():
            raise Refused(503, "", reason)
        if cmd.run in c.rounds:
            raise Refused(409, "run", f"round {c.rounds[cmd.run].spec.round_id!r} of run {cmd.run!r} is still open")
        c.ledger.check(cmd.run, cmd.prompts)
        run = c.ledger.run(cmd.run)
        run.rounds_opened += 1
        rnd = Round(cmd, run, run.rounds_opened)
        rnd.stats.carried_in = report.sizes(run)
        groups = c.ledger.accept(cmd.run, cmd.prompts, cmd.params)
        rnd.mark_mandatory(c.clock.version)
        c.rounds[cmd.run] = rnd
        self._dirty = True
        return {"incarnations": [g.incarnation for g in groups], "policy_version": c.clock.version}

    def _stop(self, cmd: wire.StopRound) -> dict[str, Any]:
        rnd = next((r for r in self.context.rounds.values() if r.spec.round_id == cmd.round_id), None)
        if rnd is None:
            return {"open": False}
        self.context.engine.settle()
        self._end(rnd, "stopped", cmd.deliver)
        return {"open": True}

    def _drop(self, cmd: wire.Drop) -> dict[str, Any]:
        c = self.context
        run = c.ledger.runs.get(cmd.run)
        if run is None:
            return {"groups": [], "samples": 0}
        doomed = run.named(cmd.ids)
        if any(g.counts[State.RUNNING] for g in doomed):
            c.engine.settle()
            self._end_due()  # the step in flight may have met a quota
            doomed = run.named(cmd.ids)
            self.suspender.suspend([s for g in doomed for s in g.samples.values()])
        samples = c.ledger.drop(run, [g.id for g in doomed])
        c.trace("drop", samples)
        for sample in samples:
            c.engine.forget(sample)
        self._dirty = True
        return {"groups": [[g.id, g.incarnation] for g in doomed], "samples": len(samples)}

    # --- pushes and pauses (S1, S2)

    def interrupt(self) -> None:
        """Before whatever needs our samples out of the engine: rounds that are over end, all others are suspended."""
        self._end_due()
        self.suspender.suspend_all()
        self._end_due()

    def push_begin(self, version: int | None) -> None:
        self.context.clock.begin(version)
        self.interrupt()

    def _push_end(self, version: int | None) -> dict[str, Any]:
        self.context.clock.end(version)
        self._version_moved()
        return {"policy_version": self.context.clock.version}

    def weight_call_ended(self, ok: bool, message: str, *, whole: bool) -> None:
        """A stock weight call has been applied, or has failed on some rank."""
        c = self.context
        if c.clock.weight_call(ok, message, c.engine.forward_count(), whole=whole):
            self._version_moved()

    def _version_moved(self) -> None:
        c = self.context
        c.engine.version = c.clock.version
        c.engine.renew_keys()
        for rnd in c.rounds.values():
            rnd.mark_mandatory(c.clock.version)
            rnd.stats.pushes += 1
        self._dirty = True

    def freeze(self) -> None:
        self.interrupt()
        self.context.frozen = True

    def thaw(self) -> None:
        self.context.frozen = False

    def abort_everything(self) -> None:
        """SGLang's abort of all requests: open rounds end with what they have, the carry is untouched (S2)."""
        self._end_due()
        for rnd in list(self.context.rounds.values()):
            self.context.engine.settle()
            self._end(rnd, "stopped", None)

    # --- steps

    def before_step(self) -> None:
        """Top of a scheduling step: end what is over, make room, fill free slots."""
        c = self.context
        c.step += 1
        self._end_due()
        if c.ledger.runs:
            self.suspender.relieve()
        if c.rounds and c.may_step():
            self.resumer.admit()
            self._end_due()  # a full queue may have given a sample up at once
            for rnd in c.rounds.values():
                rnd.stats.timeline.note(rnd.run.running)
        c.write_digest()

    def resume(self) -> bool:
        return self.context.may_step() and self.resumer.resume()

    def _end_due(self) -> None:
        """Stop in the step that meets the quota. What ends in the step in flight is surplus (S3)."""
        if not self._dirty or not any(r.ends_now() for r in self.context.rounds.values()):
            self._dirty = False
            return
        self.context.engine.settle()
        self._dirty = False
        for rnd in list(self.context.rounds.values()):
            if reason := rnd.ends_now():
                self._end(rnd, reason, None)

    def _end(self, rnd: Round, reason: wire.EndReason, ids: list[str] | None) -> None:
        c = self.context
        rnd.stats.quota_met()
        self.suspender.suspend_run(rnd.run, rnd.spec.tier)
        deliver = rnd.deliver(c.ledger, reason, ids, c.clock.version)
        carried = report.carried(c, rnd.run)
        del c.rounds[rnd.run.name]
        c.engine.send(
            wire.RoundEnded(
                rnd.spec.round_id, rnd.run.name, c.clock.version, reason, deliver, carried, rnd.stats.report(carried)
            )
        )

    # --- results of a step

    def progress(self, steps: Iterable[Progress]) -> None:
        """Step 3: count tokens and finishes; finished samples leave at once."""
        done: list[wire.FinishedSample] = []
        for sample, length, prefilled, finished in steps:
            rnd = self.context.round_of(sample)
            if rnd is not None:
                rnd.stats.tokens_generated += length - sample.length
                if rnd.stats.t_quota_met is not None:
                    rnd.stats.tokens_after_quota += length - sample.length
                if sample.recomputing:
                    rnd.stats.reprefilled_tokens += prefilled
            if length > sample.length:
                sample.recomputing = False
            sample.length = length
            if finished:
                done.append(self._finish(sample, None))
        self._announce(done)

    def aborted(self, sample: Sample, reason: dict[str, Any]) -> None:
        """The engine gave the sample up outside of a step (queue limit, out of memory, …): delivered as such (S3)."""
        if sample.state is State.RUNNING:
            self._announce([self._finish(sample, reason)])

    def retracted(self, sample: Sample) -> None:
        """SGLang took the sample's KV and queues it for another prefill."""
        version = self.context.clock.version
        sample.kv_version, sample.recomputing = version, sample.length > 0
        sample.open_span(version, "recomputed" if sample.length else "fresh")
        if rnd := self.context.round_of(sample):
            rnd.stats.retracted += 1

    def _finish(self, sample: Sample, reason: dict[str, Any] | None) -> wire.FinishedSample:
        result = self.context.engine.finished(sample, reason)
        self.context.ledger.finish(sample, self.context.step)
        result.whole = sample.group.whole
        if rnd := self.context.round_of(sample):
            result.round_id = rnd.spec.round_id
        return result

    def _announce(self, done: list[wire.FinishedSample]) -> None:
        if not done:
            return
        self._dirty = True
        self.context.engine.send(wire.Finished(done))
        for rnd in self.context.rounds.values():
            if rnd.ends_now():
                rnd.stats.quota_met()
