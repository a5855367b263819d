"""bench.timeline: the pieces of the scheduler's loop add up to the time of the rounds."""

from typing import Any

import pytest

from bench.timeline import shares


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
