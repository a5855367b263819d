"""bench.over_sampling: what more prompts in flight cost and save, from made-up rows."""

from typing import Any

import pytest

from bench.over_sampling import knee, points, table


def row(variant: str, ablation: str | None, bytes_: int, running: float, speed: float = 1000.0) -> dict[str, Any]:
    return {
        "distribution": "lognormal",
        "variant": variant,
        "ablation": ablation,
        "peak_bytes": {"device": bytes_ - 10, "host": 10},
        "carry_end": bytes_ // 10,
        "seconds": 20.0 * 1000 / speed,
        "rounds": 10,
        "plan": {"slots": 64},
        "mean_running": running,
        "full_batch_tokens_per_s": speed,
        "delivered_tokens_per_s": speed * running / 64,
    }


ROWS = [
    row("april-factor", "over-sampling 1.5", 200, 50),
    row("april-factor", "over-sampling 1", 100, 20),
    row("april-factor", "over-sampling 3", 1000, 54),
    row("april-keep", "over-sampling demand-driven", 300, 60),
    row("april-keep", None, 10, 64),
    row("outside", "over-sampling 1", 0, 20),
    row("april-keep", "n 8", 50, 63),
]


def test_idle_slots_are_counted_against_the_smallest_factor() -> None:
    found = points(ROWS, "lognormal")
    assert [p.name for p in found] == ["1×", "1.5×", "3×", "demand-driven"]
    assert [p.idle for p in found] == pytest.approx([88, 28, 20, 8])  # two seconds a round times the empty slots
    assert [p.saved for p in found] == pytest.approx([0, 60, 68, 80])
    assert [p.peak_bytes for p in found] == [100, 200, 1000, 300]
    assert points([row("april-factor", "over-sampling 1", 3_000_010, 20)], "lognormal")[0].by_tier == (
        "device 3.0, host 0.0"
    )


def test_faster_machine_saves_no_idle_slots() -> None:
    found = points(
        [row("april-factor", "over-sampling 1", 100, 20, 500), row("april-factor", "over-sampling 2", 200, 20, 1000)],
        "lognormal",
    )
    assert found[1].saved == pytest.approx(0)


def test_the_knee_is_where_more_bytes_begin_to_save_little() -> None:
    found = points(ROWS, "lognormal")
    assert knee(found) is found[1]  # 1.5×: three quarters of what can be saved, for half the bytes
    assert [line[-1] for line in table(found)] == ["", "", "knee", "", ""]
    assert knee([]) is None
    assert points([ROWS[3]], "lognormal") == []
