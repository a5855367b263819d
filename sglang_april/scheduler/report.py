"""Reports for replies and for `GET /april/state` and `GET /april/partials`."""

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import Any

from sglang_april.kv import cost_model
from sglang_april.scheduler.context import Context
from sglang_april.scheduler.quota import Round
from sglang_april.scheduler.runs import Run
from sglang_april.scheduler.state import Sample, State
from sglang_april.scheduler.tiers import Tiers
from sglang_april.scheduler.trajectory_run import TrajectoryRun


def carried(c: Context, run: Run) -> dict[str, Any]:
    """The `carried` field of a reply: what the run carries over to its next round."""
    ages = [g.staleness(c.clock.version) for g in run.groups.values()]
    tokens, by_tier = _tiers(c, run.suspended)
    return {
        **sizes(run),
        "tokens_by_tier": tokens,
        "bytes": by_tier,
        "oldest_staleness": max(ages, default=0),
        "finished_groups": run.whole,
        "running": run.running,
    }


def concurrency(rnd: Round) -> dict[str, Any]:
    """The concurrency of a round at its end, and for `auto` the step times that it is based on."""
    auto = rnd.tuned if rnd.spec.concurrency == "auto" else None
    return {"concurrency": rnd.concurrency, "step_ms": [list(point) for point in auto.step_ms] if auto else None}


def lengths(run: Run) -> bytes:
    """int32: output tokens so far of each unfinished sample that has any."""
    return array("i", [s.length for s in (*run.suspended, *run.samples(State.RUNNING)) if s.length]).tobytes()


def sizes(run: Run) -> dict[str, int]:
    """Undelivered groups and samples of a run, and the output tokens of its unfinished and of its finished samples."""
    return {
        "groups": len(run.groups),
        "samples": sum(len(g.samples) for g in run.groups.values()),
        "tokens": sum(s.length for s in (*run.suspended, *run.samples(State.RUNNING))),
        "finished_tokens": sum(s.length for s in run.samples(State.FINISHED)),
    }


def _tiers(c: Context, samples: Iterable[Sample]) -> tuple[dict[str, int], dict[str, int]]:
    """KV tokens and bytes by tier; `none` counts output tokens without KV."""
    tokens = {"device": 0, "host": 0, "disk": 0, "none": 0}
    for sample in samples:
        if sample.kv.pages is None:
            tokens["none"] += sample.length
        else:
            tokens[sample.kv.pages.tier] += sample.kv.pages.length
    engine = c.engine
    size = {
        "device": engine.bytes_per_token,
        "host": engine.stored_bytes_per_token,
        "disk": engine.stored_bytes_per_token,
    }
    return tokens, {tier: tokens[tier] * per_token for tier, per_token in size.items()}


def state(c: Context) -> dict[str, Any]:
    """The scheduler's part of `GET /april/state`."""
    suspended = [s for run in c.ledger.runs.values() for s in run.suspended]
    parked = [s for run in c.ledger.runs.values() for s in run.parked if s.kv.pages is not None]
    stored = [*suspended, *parked]
    tokens, by_tier = _tiers(c, stored)
    groups = [g for run in c.ledger.runs.values() for g in run.groups.values()]
    ages = Counter(str(g.staleness(c.clock.version)) for g in groups)
    held = sum(c.engine.held_tokens(s.kv.pages) for s in stored if s.kv.pages is not None)
    return {
        "policy_version": c.clock.version,
        "push_open": c.clock.open,
        "closed": c.closed(),
        "unnamed": c.clock.without_weights,
        "failed": c.clock.failed,
        "frozen": c.frozen,
        "step": c.step,
        "overlap": c.engine.overlap,
        "gpus": c.engine.gpus,
        "rounds": [
            {
                "round_id": r.spec.round_id,
                "run": r.spec.run,
                "quota": r.spec.quota,
                "counted": r.counted(),
                "mandatory": r.waiting_for(),
            }
            for r in c.rounds.values()
        ],
        "tuned": {"concurrency": c.tuned.concurrency, "step_ms": c.tuned.step_ms} if c.tuned is not None else None,
        "ahead": [{"run": r.spec.run, "waiting": r.run.whole, "rests": r.limit_reached} for r in c.ahead.values()],
        "samples": c.ledger.census(),
        "staleness": dict(sorted(ages.items())),
        "journal": c.recorder.state(),
        "runs": {run.name: sizes(run) for run in c.ledger.runs.values() if not run.attached},
        "attached": _attached(c),
        "trajectories": {run.name: _trajectories(c, run) for run in c.trajectories.values()},
        "tokens": tokens,
        "bytes": by_tier,
        "parked_tokens": sum(s.kv.pages.length for s in parked if s.kv.pages is not None),
        "pool": {**c.engine.pool_tokens(), "held": held},
        "host_cap_tokens": c.host_cap_tokens,
        "carry_tokens": c.ledger.tokens(),
        "carry_cap_tokens": c.carry_cap_tokens,
        "kv_pages": c.engine.kv_pages,
        "kv_cost": kv_cost(c),
    }


def _attached(c: Context) -> dict[str, dict[str, int]]:
    """Sizes of the pending attached requests of each run, legs included."""
    pending: dict[str, Counter[str]] = {}
    for run in c.ledger.runs.values():
        if run.attached and run.groups:
            pending.setdefault(run.name, Counter()).update(sizes(run))
    return {name: dict(total) for name, total in pending.items()}


def _trajectories(c: Context, run: TrajectoryRun) -> dict[str, Any]:
    """How many undelivered trajectories a run has, how many are done, the oldest one's staleness, and mismatches."""
    active = run.active.values()
    return {
        "undelivered": len(active),
        "done": len(run.done),
        "oldest_staleness": max((t.staleness(c.clock.version) for t in active), default=0),
        "mismatches": sum(t.mismatches for t in active),
    }


def brief(c: Context) -> dict[str, Any]:
    """The state that the audit reads before and after each sample, and a release of memory; cheap."""
    running = sum(run.running for run in c.ledger.runs.values())
    return {
        "policy_version": c.clock.version,
        "closed": c.closed(),
        "frozen": c.frozen,
        "running": running,
        "unnamed": c.clock.without_weights,
        "released": c.engine.memory_released(),
    }


def kv_cost(c: Context) -> dict[str, Any] | None:
    """The costs by which `kv: auto` decides."""
    return cost_model.report(c.rates, c.engine.bytes_per_token)


def partials(c: Context, run: str | None) -> list[dict[str, Any]]:
    """Suspended samples of a run, or of all."""
    runs = [r for r in c.ledger.runs.values() if not r.attached and run in (None, r.name)]
    return [
        {
            "run": r.name,
            "id": s.group.id,
            "incarnation": s.group.incarnation,
            "index": s.index,
            "tokens": s.length,
            "tier": s.kv.pages.tier if s.kv.pages is not None else "none",
            "kv_version": s.kv.version,
            "spans": [[x.start, x.end, x.version, x.kv] for x in s.closed_spans()],
        }
        for r in runs
        for s in r.suspended
    ]


def groups(c: Context, run: str | None) -> dict[str, list[dict[str, Any]]]:
    """Undelivered groups of a run, or of all; a caller can drop those that are `unstarted` without losing a token."""
    runs = [r for r in c.ledger.runs.values() if not r.attached and run in (None, r.name)]
    rows = [
        (g.begun, {"run": r.name, "id": g.id, "incarnation": g.incarnation}) for r in runs for g in r.groups.values()
    ]
    return {"groups": [row for _, row in rows], "unstarted": [row for begun, row in rows if not begun]}


def store(c: Context, tiers: Tiers) -> dict[str, Any]:
    """The page store's part of `GET /april/state`: tokens by tier, budgets, and failures."""
    return {
        "used_tokens": dict(tiers.used),
        "cap_tokens": {"host": c.host_cap_tokens, "disk": c.disk_cap_tokens},
        "page_tokens": c.store_page,
        "in_flight": len(tiers.transfers),
        "lost": tiers.lost_total,
        "last_failure": tiers.last_failure,
    }
