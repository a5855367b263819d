"""Steps 2 to 6 and 9 on one scheduler: commands in, decisions at step boundaries, events out.

The adapter calls `command` for each broadcast message, `before_step` at the top of every scheduling step, `resume`
where a prefill could be launched, and `progress` after each step's results. All four run on every TP rank with the same
input.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang_april import wire
from sglang_april.policy.push import Refused
from sglang_april.policy.staleness import staleness
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.resume import Resumer
from sglang_april.scheduler.suspend import Suspender
from sglang_april.types import Run, Sample, State


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
        """Carry out one broadcast message and answer it; a refusal changes nothing."""
        try:
            data = self._carry_out(cmd)
            answer = wire.Answer(cmd.seq, data=data or {})
        except Refused as no:
            answer = wire.Answer(cmd.seq, no.status, no.field, no.reason)
        self.context.engine.send(answer)

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
                return self.state()
            case wire.GetPartials():
                return {"partials": self._partials(cmd.run)}
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
        rnd.stats.carried_in = _sizes(run)
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
        ids = list(run.groups) if cmd.ids is None else dict.fromkeys(cmd.ids)
        doomed = [run.groups[i] for i in ids if i in run.groups]
        if any(g.counts[State.RUNNING] for g in doomed):
            c.engine.settle()
            self.suspender.suspend([s for g in doomed for s in g.samples.values()])
        samples = c.ledger.drop(run, [g.id for g in doomed])
        c.trace("drop", samples)
        for sample in samples:
            c.engine.forget(sample)
        self._dirty = True
        return {"groups": [[g.id, g.incarnation] for g in doomed], "samples": len(samples)}

    # --- pushes and pauses (S1, S2)

    def push_begin(self, version: int | None) -> None:
        self.context.clock.begin(version)
        self.suspender.suspend_all()

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
        self.suspender.suspend_all()
        self.context.frozen = True

    def thaw(self) -> None:
        self.context.frozen = False

    def abort_everything(self) -> None:
        """SGLang's abort of all requests: open rounds end with what they have, the carry is untouched (S2)."""
        for rnd in list(self.context.rounds.values()):
            self.context.engine.settle()
            self._end(rnd, "stopped", None)

    # --- steps

    def before_step(self) -> None:
        """Top of a scheduling step: end what is over, make room, fill free slots."""
        c = self.context
        c.step += 1
        if self._dirty:
            self._end_due()
        if c.ledger.runs:
            self.suspender.relieve()
        if c.rounds and c.may_step():
            self.resumer.admit()
            for rnd in c.rounds.values():
                rnd.stats.timeline.note(rnd.run.running)
        c.write_digest()

    def resume(self) -> bool:
        return self.context.may_step() and self.resumer.resume()

    def _end_due(self) -> None:
        """Stop in the step that meets the quota. What ends in the step in flight is surplus (S3)."""
        if not any(r.ends_now() for r in self.context.rounds.values()):
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
        carried = self._carried(rnd.run)
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

    # --- reports

    def _carried(self, run: Run) -> dict[str, Any]:
        """What the run leaves for its next round."""
        ages = [staleness(g, self.context.clock.version) for g in run.groups.values()]
        tokens, by_tier = self._tiers(run.suspended)
        return {
            **_sizes(run),
            "tokens_by_tier": tokens,
            "bytes": by_tier,
            "oldest_staleness": max(ages, default=0),
            "finished_groups": run.whole,
        }

    def _tiers(self, samples: Iterable[Sample]) -> tuple[dict[str, int], dict[str, int]]:
        """KV tokens and bytes by tier; `none` counts output tokens whose KV is gone."""
        tokens = {"device": 0, "host": 0, "none": 0}
        for sample in samples:
            if sample.pages is None:
                tokens["none"] += sample.length
            else:
                tokens[sample.pages.tier] += sample.pages.length
        size = self.context.engine.bytes_per_token
        return tokens, {tier: n * size for tier, n in tokens.items() if tier != "none"}

    def state(self) -> dict[str, Any]:
        c = self.context
        partials = [s for run in c.ledger.runs.values() for s in run.suspended]
        tokens, by_tier = self._tiers(partials)
        held = sum(c.engine.held_tokens(s.pages) for s in partials if s.pages is not None)
        return {
            "policy_version": c.clock.version,
            "push_open": c.clock.open,
            "closed": c.closed(),
            "frozen": c.frozen,
            "step": c.step,
            "overlap": c.engine.overlap,
            "rounds": [
                {"round_id": r.spec.round_id, "run": r.run.name, "quota": r.spec.quota, "counted": r.counted()}
                for r in c.rounds.values()
            ],
            "samples": c.ledger.census(),
            "runs": {run.name: _sizes(run) for run in c.ledger.runs.values()},
            "tokens": tokens,
            "bytes": by_tier,
            "pool": {**c.engine.pool_tokens(), "held": held},
            "host_cap_tokens": c.host_cap_tokens,
        }

    def _partials(self, run: str | None) -> list[dict[str, Any]]:
        runs = [r for r in self.context.ledger.runs.values() if run is None or r.name == run]
        return [
            {
                "run": r.name,
                "id": s.group.id,
                "incarnation": s.group.incarnation,
                "index": s.index,
                "tokens": s.length,
                "tier": s.pages.tier if s.pages is not None else "none",
                "kv_version": s.kv_version,
                "spans": [[x.start, x.end, x.version, x.kv] for x in s.closed_spans()],
            }
            for r in runs
            for s in r.suspended
        ]


def _sizes(run: Run) -> dict[str, int]:
    """Undelivered groups and samples of a run, and the output tokens of its unfinished samples."""
    return {
        "groups": len(run.groups),
        "samples": sum(len(g.samples) for g in run.groups.values()),
        "tokens": sum(s.length for s in run.suspended),
    }
