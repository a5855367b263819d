"""Recounts every counter, state and pool slot from scratch (`one-place`, `pool-accounting`)."""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sglang_april.api.messages import Span
from sglang_april.kv.kv_pages import KvState, Pages
from sglang_april.scheduler.ledger import Ledger
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Sample, State
from tests.unit.fake_engine import FakeEngine
from tests.unit.fake_request import Request

STATES = QUEUED, RUNNING, SUSPENDED, FINISHED, PARKED = tuple(State)


WITH_SLOTS = {KvState.DEVICE, KvState.DEVICE_WITH_COPY, KvState.COPYING_OUT, KvState.LOADING}
IN_TRANSFER = {KvState.COPYING_OUT, KvState.COPYING_OUT_SLOTS_FREED, KvState.LOADING}


def samples_of(ledger: Ledger) -> Iterator[Sample]:
    pending = (s for run in ledger.runs.values() for g in run.groups.values() for s in g.samples.values())
    return itertools.chain(pending, (s for run in ledger.runs.values() for s in run.parked if s.state is State.PARKED))


def spans_of(request: Request) -> list[Span]:
    """The expected spans: runs of tokens with equal (version, provenance)."""
    spans: list[Span] = []
    before = None
    for i, drawn in enumerate(request.drawn_under):
        if drawn != before:
            spans.append(Span(i, i, *drawn))
            before = drawn
        spans[-1] = Span(spans[-1].start, i + 1, *drawn)
    return spans


def recount(engine: FakeEngine, ledger: Ledger) -> None:
    totals = [0] * len(STATES)
    for run in ledger.runs.values():
        totals = [a + b for a, b in zip(totals, _recount_run(run), strict=True)]
    assert list(ledger.census().values()) == totals[:-1]
    rows = [r.request for r in engine.last or () if r.request is not engine.chunked and r.request.slots is not None]
    chunked = [engine.chunked] if engine.chunked is not None else []
    in_batches = [*engine.running, *rows, *chunked]
    in_engine = [*engine.waiting, *in_batches]
    samples = list(samples_of(ledger))
    for sample in samples:
        _check_place(engine, sample, in_engine)
    _recount_pool(engine, samples, in_batches)
    parked = [s for s in samples if s.state is PARKED]
    assert sorted(engine.controller.tiers.parked._tokens, key=id) == sorted(parked, key=id)
    assert engine.controller.tiers.parked.tokens == sum(s.kv.pages.length for s in parked)
    kept = list(ledger.with_kv())
    assert len(kept) == len(set(kept)), "a sample is counted twice"


def _recount_run(run: Run) -> list[int]:
    """Samples by state, in the order of `State`."""
    totals = [0] * len(STATES)
    whole, begun, new, suspended = 0, set(), [], []
    for name, group in run.groups.items():
        assert name == group.id
        assert group.samples, "a group without samples is delivered"
        states = [s.state for s in group.samples.values()]
        queued, _, waits, finished, _ = counts = [states.count(state) for state in STATES]
        assert list(group.counts.values()) == counts
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
        whole += finished == len(states)
        if waits:
            suspended += [s for s in group.samples.values() if s.state is SUSPENDED]
        continues = group.leg is not None and group.leg.trajectory.begun
        queue = "new" if queued == group.prompt.n and not continues else "begun" if queued else ""
        assert group.queue == queue
        if queue == "new":
            new.append(group)
        elif queue == "begun":
            begun.add(group)
    assert [run.running, run.finished, run.whole] == [totals[1], totals[3], whole]
    assert run.suspended.keys() == set(suspended)
    assert run.queued.begun.keys() == begun
    assert run.queued.new == sorted(new, key=lambda g: g.gid)
    return totals


def _check_place(engine: FakeEngine, sample: Sample, in_engine: list[Request]) -> None:
    """Check that a sample is in exactly one place."""
    request: Request | None = sample.request
    assert (in_engine.count(request) if request is not None else 0) == (sample.state is RUNNING), sample.state
    if sample.state is QUEUED or sample.state is FINISHED:
        assert request is None or sample.attached
        assert sample.kv.pages is None or sample in sample.group.run.parked
        return
    if sample.state is PARKED:
        assert request is None
        assert sample in sample.group.run.parked
        return
    assert sample.closed_spans(len(request.output)) == spans_of(request)
    if sample.state is RUNNING:
        assert sample.length <= len(request.output)
        assert sample.kv.pages is None or (sample in sample.group.run.parked and request in engine.waiting)
        return
    assert sample.length == len(request.output) > 0
    assert request.slots is None
    if sample.kv.pages is not None:
        assert sample.kv.pages.length == request.prompt + sample.length - 1
        if (cells := _cells(engine, sample.kv.pages)) is None:
            return
        assert all(c[0] == request.name and c[1] == p for p, c in enumerate(cells))
        assert sample.kv.version == min(c[2] for c in cells)


def _cells(engine: FakeEngine, pages: Pages) -> list[Any] | None:
    """The KV itself; None for a failed copy whose failure is not reported yet."""
    assert pages.slots is not None or pages.copy is not None
    if pages.ready:
        return [engine.cells[slot] for slot in pages.slots]
    assert pages.copy is not None
    cells = engine.copies.held.get(pages.copy.number)
    unreported = engine.copies.unreported_failure()
    assert cells is not None or pages.transfer is not None or unreported, "no copy, and no slots to be read from"
    return cells


def _recount_store(engine: FakeEngine, samples: list[Sample]) -> None:
    """Budgets equal the cost of the copies and of the prefixes that they share, and are within their caps."""
    context, used = engine.controller.context, engine.controller.tiers.used
    copies = [s.kv.pages.copy for s in samples if s.kv.pages is not None and s.kv.pages.copy is not None]
    users = Counter(p for p in (*(c.prefix for c in copies), *(s.kv.prefix for s in samples)) if p is not None)
    assert all(prefix.users == count for prefix, count in users.items())
    prefixes = {"host": sum(p.length for p in users), "disk": 0}
    for tier, cap in (("host", context.host_cap_tokens), ("disk", context.disk_cap_tokens)):
        assert used[tier] == sum(c.cost for c in copies if c.tier == tier) + prefixes[tier] <= cap
    numbers = {c.number for c in copies}
    assert not set(engine.copies.remaining()) - numbers, "leaked copies"


def _recount_pool(engine: FakeEngine, samples: list[Sample], in_batches: list[Request]) -> None:
    """Check that every pool token has exactly one owner."""
    owned = list(engine.free)
    for request in in_batches:
        owned += request.slots or []
    pages = [s.kv.pages for s in samples if s.kv.pages is not None]
    for p in pages:
        owned += p.slots or []
        assert p.state is not KvState.RELEASED
        assert (p.slots is not None) == (p.state in WITH_SLOTS)
        assert (p.copy is not None) == (p.state is not KvState.DEVICE)
        assert (p.transfer is not None) == (p.state in IN_TRANSFER)
    assert len(owned) == len(set(owned)) == engine.pool, "a slot is lost or owned twice"
    _recount_store(engine, samples)
    assert len(in_batches) <= engine.slots
