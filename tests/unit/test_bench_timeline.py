"""bench.timeline and bench.host_time: the parts of the scheduler loop add up to the rounds, or to a step."""

from typing import Any

import pytest

from bench.host_time import per_step
from bench.timeline import gap, shares


def span(piece: str, at: float, took: float, rows: int | None = None, *, decode: bool | None = None) -> dict[str, Any]:
    of_forward = {} if rows is None else {"rows": rows, "decode": decode, "context": 100 * rows}
    return {"piece": piece, "at": at, "took": took, **of_forward}


def test_parts_add_up_to_the_rounds() -> None:
    spans = [
        span("requests", 10.1, 0.4),
        span("run", 11.0, 2.0),
        span("forward", 11.1, 1.0, 5, decode=False),
        span("sample", 12.2, 0.5),
        span("results", 13.0, 0.5),
        span("next", 13.5, 0.25),
        span("run", 14.0, 4.0),
        span("forward", 14.0, 3.0, 8, decode=True),
        span("run", 25.0, 1.0),
    ]
    reported = shares(spans, [(10.0, 20.0)])
    assert [reported.pop(name) for name in ("steps", "rows", "context", "decode_ms")] == [1, 8, 100, 3000]
    assert reported == pytest.approx(
        # 1 s before the first step and 2 s after the last, 0.4 s of them for a control request.
        {
            "decode": 0.3,
            "prefill": 0.1,
            "sample": 0.05,
            "run": 0.15,
            "results": 0.05,
            "next": 0.025,
            "requests": 0.04,
            "between": 0.26,
            "loop": 0.025,
        }
    )
    assert sum(reported.values()) == pytest.approx(1)


def test_rounds_without_a_step_are_all_between() -> None:
    reported = shares([], [(0.0, 2.0)])
    assert (reported["between"], reported["steps"], reported["rows"], reported["context"]) == (1.0, 0, 0.0, 0.0)


def test_gap_is_the_idle_time_between_rounds_without_the_push() -> None:
    launches = (10.5, 10.7, 10.9, 11.1, 20.6, 20.8, 21.0, 30.4, 30.6)
    spans = [span("forward", at, 0.01, 8, decode=at not in (10.5, 20.6, 30.4)) for at in launches]
    ends = (11.0, 0.03), (11.12, 0.05), (20.7, 0.02), (21.15, 0.07)
    results = [{**span("results", at, took), "cpu": 0.02} for at, took in ends]
    measured = gap([*spans, *results], [(10.0, 11.2), (20.0, 21.3), (30.0, 31.0)], [0.3, 0.3])
    # The last forwards end at 11.15 and 21.2, 0.05 and 0.1 s before the reply; 0.3 and 0.1 s after the push, the first
    # one starts. The seconds from a reply to the next push are not the engine's.
    assert measured == pytest.approx(
        {"step_ms": 200, "push_ms": 300, "idle_ms": 575, "start_ms": 200, "after_ms": 75, "idle_steps": 1.375}
    )


def test_samples_that_run_on_are_idle_during_the_push() -> None:
    launches = (10.5, 10.7, 10.9, 11.1, 11.3, 11.9, 12.1)
    spans = [span("forward", at, 0.01, 8, decode=True) for at in launches]
    results = [{**span("results", 11.31, 0.19), "cpu": 0.0}]
    measured = gap([*spans, *results], [(10.0, 11.0), (11.0, 13.0)], [0.7], stops=False)
    # The forward launched at 11.3 ends at 11.5, and the next begins at 11.9, 0.2 s after the push.
    assert measured == pytest.approx({"step_ms": 200, "push_ms": 700, "idle_ms": 400, "idle_steps": -1.5})


def test_host_time_is_that_of_full_batches_without_the_model() -> None:
    def on_cpu(piece: str, thread: float, cpu: float, rows: int | None = None) -> dict[str, Any]:
        return {**span(piece, 0.0, 0.0, rows, decode=True), "thread": thread, "cpu": cpu}

    step = [
        ("forward", 1.0, 2.0, 4),
        ("sample", 3.0, 0.5, None),
        ("run", 0.75, 3.0, None),
        ("results", 4.0, 0.25, None),
    ]
    spans = [on_cpu("forward", 0.0, 9.0, 1)]
    spans += [on_cpu(piece, 5.0 * i + at, cpu, rows) for i in range(3) for piece, at, cpu, rows in step]
    parts = per_step(spans, 4)
    assert parts.pop("steps") == 2
    # A step takes 5 s: 2 in the forward, 0.5 in the sampler, 0.5 in the rest of `run`, 0.25 in `results`.
    assert parts == {
        "host_ms": 2500.0,
        "forward_ms": 2000.0,
        "sample_ms": 500.0,
        "run_ms": 500.0,
        "results_ms": 250.0,
        "next_ms": 0.0,
        "requests_ms": 0.0,
        "loop_ms": 1750.0,
    }
    with pytest.raises(ValueError, match="1 steps had 1 rows"):
        per_step(spans, 1)
