"""Checks every event and forward of the scheduler against the `ReferenceModel` as it happens."""

from collections.abc import Callable

import msgspec
import numpy as np

from sglang_april.api import messages
from sglang_april.scheduler.controller import Controller
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.state import Sample, sample_seed
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import Request, Row, token
from tests.unit.recount import samples_of, spans_of
from tests.unit.reference_model import FinishedEntry, Key, ModelRound, ReferenceModel, oldest_of


class EventChecks(ReferenceModel):
    """Receives the events of all replicas, and engine callbacks of the first one."""

    engine: FakeEngine
    controller: Controller
    ledger: Ledger
    push_open: bool
    frozen: bool
    sent: list[list[bytes]]
    answers: dict[int, messages.Answer]
    replies: list[messages.RoundEnded]
    samples: dict[tuple[Key, int], messages.FinishedSample]
    _then: Callable[[messages.Answer], None]

    def _receive(self, replica: int, event: messages.Event) -> None:
        stable = msgspec.structs.replace(event, stats={}) if isinstance(event, messages.RoundEnded) else event
        self.sent[replica].append(messages.encode(stable))
        if replica == 0:
            match event:
                case messages.Answer():
                    self.answers[event.seq] = event
                    if event.status == 200:
                        self._then(event)
                case messages.Finished():
                    for sample in event.samples:
                        self._finished(sample)
                case messages.RoundEnded():
                    self._ended(event)

    def _finished(self, s: messages.FinishedSample) -> None:
        group, length = self.groups[s.run, s.id, s.incarnation], len(s.output_ids) // 4
        assert s.index in group.undelivered
        assert s.index not in group.finished, "finished twice"
        request = self.engine.ended.pop((s.run, s.id, s.incarnation, s.index))
        assert s.seed == sample_seed(0, s.id, s.incarnation, s.index)
        assert np.frombuffer(s.output_ids, "<i4").tolist() == [token(s.seed, t) for t in range(length)]
        assert len(s.logprobs) == len(s.output_ids)
        assert s.spans == spans_of(request)
        step = self.controller.context.step
        group.finished[s.index] = FinishedEntry(step, self.engine.first_start[request.name], oldest_of(request))
        self.samples[group.key, s.index] = s
        assert s.whole == group.whole
        assert s.round_id == (self.rounds[s.run].spec.round_id if s.run in self.rounds else None)

    def _ended(self, e: messages.RoundEnded) -> None:
        rnd = self.rounds.pop(e.run)
        assert (e.round_id, e.policy_version) == (rnd.spec.round_id, self.version)
        assert e.end_reason == ("stopped" if rnd.stop else self.due(rnd))
        judged = rnd.spec.count == "accepted"
        assert e.verdicts == {g.key[1]: g.accepted for g in self.of(e.run) if judged and g.accepted is not None}
        self.check_delivery(rnd, e)
        assert (e.stats["tokens_generated"], e.stats["reprefilled_tokens"]) == (rnd.generated, rnd.reprefilled)
        between = e.stats["ahead"]
        assert rnd.before == (between and (between["tokens_generated"], between["reprefilled_tokens"]))
        assert e.stats["tokens_after_quota"] <= (self.engine.slots if self.engine.overlap else 0)
        self.replies.append(e)
        for d in e.deliver:
            group = self.groups[e.run, d.id, d.incarnation]
            for index in d.indices:
                del group.finished[index]
                group.undelivered.remove(index)
                self.leave(group.key, index, "delivered")
            assert d.complete == (not group.undelivered)
            if d.complete:
                del self.groups[group.key]
        left = list(self.of(e.run))
        tokens = sum(len(r.output) for g in left for r in self.requests(g))
        sizes = {"groups": len(left), "samples": sum(len(g.undelivered) for g in left), "tokens": tokens}
        assert {name: e.carried[name] for name in sizes} == sizes
        if rnd.spec.after_quota == "continue" and left:
            self.ahead[e.run] = ModelRound(rnd.spec)
        assert sum(memoryview(e.carried_lengths).cast("i")) == tokens
        running = e.carried["running"]
        assert not running or (e.run in self.ahead and not self.rests(self.ahead[e.run]))

    def _forward(self, rows: list[Row]) -> None:
        """Called when a forward starts."""
        over = [r for r in self.rounds.values() if self.due(r)]
        assert not over or self.engine.late_abort, "a forward after the end of a round"
        stepping = [r.request.sample for r in rows if r.request.sample is not None]
        resting = {run for run, rnd in self.ahead.items() if self.rests(rnd)} if not self.engine.late_abort else set()
        active = {*self.rounds, *self.ahead} - resting
        assert {s.group.run.name for s in stepping} <= active, "a sample steps outside of a round"
        stopped = self.push_open or self.frozen or self.engine.flush_pending or self.engine.released
        assert not stepping or not (stopped or self.controller.context.clock.closed)
        for run, rnd in (self.ahead | self.rounds).items():
            bound = rnd.spec.concurrency
            assert self.ledger.runs[run].running <= (bound if isinstance(bound, int) else self.engine.slots)
            if rnd.spec.max_staleness == 0 and rnd.spec.quota_unit == "group" and rnd.spec.quota is not None:
                begun = sum(g.begun for g in self.ledger.runs[run].groups.values()) if run in self.rounds else 0
                if rnd.spec.count == "accepted":
                    begun -= sum(g.accepted is False for g in self.of(run))
                assert begun <= max(rnd.spec.quota, rnd.begun_before), "strict on-policy starts too many groups"

    def _results(self, rows: list[Row], grown: list[Request]) -> None:
        """Called when a step's results are processed; `grown` have one more token."""
        for row in rows:
            sample = row.request.sample
            if sample is not None and sample.request is row.request and row.request.recomputed:
                self.active_round(sample).reprefilled += row.prefilled
        for request in grown:
            if request.sample is not None:
                self.active_round(request.sample).generated += 1
                run = request.sample.group.run.name
                group = self.groups[run, request.sample.group.id, request.sample.group.incarnation]
                if group.first_round is None:
                    group.first_round = self.opened[run] + (run not in self.rounds)

    def active_round(self, sample: Sample) -> ModelRound:
        run = sample.group.run.name
        return self.rounds[run] if run in self.rounds else self.ahead[run]

    def _retract(self, request: Request) -> None:
        """Before the engine retracts, all partials are demoted and newer samples suspended (`partials-yield`)."""
        assert not any(s.kv.pages and s.kv.pages.tier == "device" for s in samples_of(self.ledger)), (
            "partials hold pages"
        )
        assert sum(r.sample is not None and r.reason is None for r in self.engine.running) <= 1
